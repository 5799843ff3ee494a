"""What the study of solved tasks trains: the Tower of Hanoi, and the tutorial's guessing game.

Both are small enough to be solved in half of a run; the other half shows whether they stay solved. An agent
comes from 300 steps of imitation of a careless player; each task has three, which differ in their seed alone.
"""

from __future__ import annotations

import collections
import functools
import itertools
import random
from pathlib import Path
from typing import Any

import torch
from _task import Task
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM, set_seed

from trl_stppo.models.small import tiny_config, tiny_tokenizer

PEGS, DISCS, MOVES = "ABC", 3, 10
GOAL = PEGS[-1] * DISCS
ACTIONS = ["".join(pair) for pair in itertools.permutations(PEGS, 2)]
STARTS = [where for where in map("".join, itertools.product(PEGS, repeat=DISCS)) if where != GOAL]
NUMBERS, GUESSES = 7, 3
AGENTS = 3
SETTINGS = {  # the tutorial's
    "max_turn_tokens": 4,
    "critic_learning_rate": 1e-3,
    "per_device_eval_batch_size": 140,
}


def moved(where: str, action: str) -> str | None:
    """The position after a move such as AC; None if the rules forbid it."""
    if action not in ACTIONS:
        return None
    source, target = action
    tops = [where.find(peg) for peg in (source, target)]
    if tops[0] < 0 or -1 < tops[1] < tops[0]:
        return None
    return where[: tops[0]] + target + where[tops[0] + 1 :]


class HanoiEnv:
    """Bring three discs to peg C within ten moves; reward 1 at the end, else 0."""

    def reset(self, *, start: str, **row: Any) -> tuple[str, dict[str, Any]]:
        """The peg of each disc, the smallest first."""
        self.where, self._left = start, MOVES
        return "\n" + self._shown(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """A move; one that the rules forbid changes nothing but the number of moves left."""
        self._left -= 1
        after = moved(self.where, action.strip())
        self.where = after or self.where
        done = self.where == GOAL
        info = {"valid_action": after is not None, "success": done}
        return self._shown(), float(done), done, not done and self._left <= 0, info

    def _shown(self) -> str:
        return " ".join(f"{disc}{peg}" for disc, peg in enumerate(self.where, 1))


@functools.cache
def distances() -> dict[str, int]:
    """Moves to the goal from each position, by breadth-first search."""
    found, queue = {GOAL: 0}, collections.deque([GOAL])
    while queue:
        here = queue.popleft()
        for after in filter(None, (moved(here, action) for action in ACTIONS)):
            if after not in found:
                found[after] = found[here] + 1
                queue.append(after)
    return found


def careless_moves() -> list[dict[str, str]]:
    """An episode of a player who takes the best move in two turns of five, else any legal one."""
    env = HanoiEnv()
    observation, over = env.reset(start=random.choice(STARTS))[0], False
    messages = [{"role": "user", "content": HANOI_PROMPT + observation}]
    while not over:
        legal = [action for action in ACTIONS if moved(env.where, action)]
        action = random.choice(legal)
        if random.random() < 0.4:
            action = min(legal, key=lambda move: distances()[moved(env.where, move) or ""])
        messages.append({"role": "assistant", "content": action})
        observation, _, terminated, truncated, _ = env.step(action)
        messages.append({"role": "user", "content": observation})
        over = terminated or truncated
    return messages[:-1]


class GuessEnv:
    """A number from 1 to 7 in three guesses; each is answered with higher or lower."""

    def reset(self, *, number: int, **row: Any) -> tuple[str, dict[str, Any]]:
        """The prompt is all that is shown."""
        self._number, self._left = number, GUESSES
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """A guess."""
        self._left -= 1
        word = action.strip()
        valid = word.isdecimal() and 1 <= int(word) <= NUMBERS
        found = valid and int(word) == self._number
        if found or self._left <= 0:
            return "over", float(found), True, False, {"valid_action": valid, "success": found}
        answer = "a number, please"
        if valid:
            answer = "higher" if int(word) < self._number else "lower"
        return answer, 0.0, False, False, {"valid_action": valid}


def careless_guesses() -> list[dict[str, str]]:
    """An episode of a player who listens half of the time."""
    number, low, high = random.randint(1, NUMBERS), 1, NUMBERS
    messages = [{"role": "user", "content": GUESS_PROMPT}]
    for _ in range(GUESSES):
        bounds = (low, high) if random.random() < 0.5 else (1, NUMBERS)
        guess = random.randint(*bounds)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == number:
            break
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
        messages.append({"role": "user", "content": "higher" if guess < number else "lower"})
    return messages


HANOI_PROMPT, GUESS_PROMPT = "bring all discs to C", "find a number from 1 to 7"
KINDS: dict[str, dict[str, Any]] = {
    "hanoi": {
        "environment": HanoiEnv,
        "prompt": HANOI_PROMPT,
        "rows": [{"start": start} for start in STARTS],
        "player": careless_moves,
        "words": [*ACTIONS, *(f"{disc}{peg}" for disc in "123" for peg in PEGS)],
        "settings": {"max_turns": MOVES, "max_completion_length": 160},
        "updates": 40,
    },
    "guess": {
        "environment": GuessEnv,
        "prompt": GUESS_PROMPT,
        "rows": [{"number": number} for number in range(1, NUMBERS + 1)],
        "player": careless_guesses,
        "words": [*map(str, range(1, NUMBERS + 1)), "higher", "lower"],
        "settings": {"max_turns": GUESSES, "max_completion_length": 64},
        "updates": 80,
    },
}


def build_solved_agent(name: str, folder: Path, steps: int = 300) -> None:
    """Teach the agent of a task such as hanoi-0, unless it is there; half a minute."""
    folder = folder / f"{name}-agent"
    if folder.is_dir():
        return
    kind_name, number = name.split("-")
    kind = KINDS[kind_name]
    set_seed(int(number))
    tokenizer = tiny_tokenizer([kind["prompt"]], vocab_size=300, markers=kind["words"])
    sizes = {"hidden_size": 64, "intermediate_size": 160, "initializer_range": 0.1}
    model = Qwen2ForCausalLM(tiny_config(tokenizer, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        _imitate(model, tokenizer, [kind["player"]() for _ in range(32)])
        optimizer.step()
        optimizer.zero_grad()
    staging = folder.with_name(folder.name + ".incomplete")
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    staging.rename(folder)


def _imitate(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, episodes: list[Any]
) -> None:
    batch = tokenizer.apply_chat_template(
        episodes,
        padding=True,
        return_tensors="pt",
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    sampled = batch.pop("assistant_masks").bool()
    model(**batch, labels=batch["input_ids"].masked_fill(~sampled, -100)).loss.backward()


def solved_task(name: str, folder: Path) -> Task:
    """The task of an agent such as hanoi-0, with the tutorial's settings."""
    kind = KINDS[name.split("-")[0]]
    prompt = [{"role": "user", "content": kind["prompt"]}]
    rows = [{"prompt": prompt, **row} for row in kind["rows"]]
    copies = -(-280 // len(rows))
    return Task(
        folder / f"{name}-agent",
        Dataset.from_list(rows * 64),
        Dataset.from_list(rows * copies),
        kind["environment"],
        {**SETTINGS, **kind["settings"]},
        episodes=128,
        updates=kind["updates"],
    )
