"""The Tower of Hanoi with three discs: a task that is solved in half of a run, and may be lost again.

Agents come from 300 steps of imitation of a player who takes the best move in two turns of five.
"""

from __future__ import annotations

import collections
import functools
import itertools
import random
from typing import Any

from _task import Messages, Task, imitate, taught
from transformers import Qwen2ForCausalLM, set_seed

from trl_stppo.models.small import tiny_config, tiny_tokenizer

PEGS, DISCS, MOVES = "ABC", 3, 10
PROMPT = "bring all discs to C"
GOAL = PEGS[-1] * DISCS
ACTIONS = ["".join(pair) for pair in itertools.permutations(PEGS, 2)]
STARTS = [where for where in map("".join, itertools.product(PEGS, repeat=DISCS)) if where != GOAL]
ROWS = [{"prompt": [{"role": "user", "content": PROMPT}], "start": start} for start in STARTS]


def moved(where: str, action: str) -> str | None:
    """Return the position after a move such as AC; None if the rules forbid it."""
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
        """Show the peg of each disc, the smallest first."""
        self.where, self._left = start, MOVES
        return "\n" + self._shown(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Move; a move that the rules forbid changes nothing but the number of moves left."""
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
    """Count the moves to the goal from each position, by breadth-first search."""
    found, queue = {GOAL: 0}, collections.deque([GOAL])
    while queue:
        here = queue.popleft()
        for after in filter(None, (moved(here, action) for action in ACTIONS)):
            if after not in found:
                found[after] = found[here] + 1
                queue.append(after)
    return found


def careless_game() -> Messages:
    """Play an episode that takes the best move in two turns of five, else any legal one."""
    env = HanoiEnv()
    observation, over = env.reset(start=random.choice(STARTS))[0], False
    messages = [{"role": "user", "content": PROMPT + observation}]
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


def teach(number: int, steps: int) -> tuple[Any, Any]:
    """Teach the agent of a number."""
    set_seed(number)
    words = [*ACTIONS, *(f"{disc}{peg}" for disc in "123" for peg in PEGS)]
    tokenizer = tiny_tokenizer([PROMPT], vocab_size=300, markers=words)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "initializer_range": 0.1}
    model = Qwen2ForCausalLM(tiny_config(tokenizer, **sizes))
    games = ([careless_game() for _ in range(32)] for _ in range(steps))
    imitate(model, tokenizer, games, itertools.repeat(5e-3))
    return model, tokenizer


TASKS = {
    "hanoi": Task(
        agent=taught("hanoi", teach, steps=300),
        rows=lambda *_: ROWS * 64,
        player={"environment_factory": HanoiEnv},
        # The tutorial's.
        args={
            "learning_rate": 4e-3,
            "lr_scheduler_type": "linear",
            "num_iterations": 2,
            "max_turns": MOVES,
            "max_turn_tokens": 4,
            "max_completion_length": 160,
        },
        critic={"critic_learning_rate": 1e-3},
        episodes=128,
        rollouts=40,
        held_out=lambda *_: ROWS * 11,
        agents=3,
    )
}
