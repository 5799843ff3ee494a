"""The tutorial's guessing game: a way to play has yet to be found.

Agents come from 300 steps of imitation of a player who heeds an answer half of the time.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from _task import Messages, Task, imitate, taught
from transformers import Qwen2ForCausalLM, set_seed

from trl_stppo.models.small import tiny_config, tiny_tokenizer

NUMBERS, GUESSES = 7, 3
PROMPT = "find a number from 1 to 7"
ROWS = [
    {"prompt": [{"role": "user", "content": PROMPT}], "number": number} for number in range(1, NUMBERS + 1)
]


class GuessEnv:
    """A number from 1 to 7 in three guesses; each is answered with higher or lower."""

    def reset(self, *, number: int, **row: Any) -> tuple[str, dict[str, Any]]:
        """Show nothing but the prompt."""
        self._number, self._left = number, GUESSES
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Guess."""
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


def careless_game() -> Messages:
    """Play an episode that heeds each answer half of the time."""
    number, low, high = random.randint(1, NUMBERS), 1, NUMBERS
    messages = [{"role": "user", "content": PROMPT}]
    for _ in range(GUESSES):
        bounds = (low, high) if random.random() < 0.5 else (1, NUMBERS)
        guess = random.randint(*bounds)
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == number:
            break
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
        messages.append({"role": "user", "content": "higher" if guess < number else "lower"})
    return messages


def teach(number: int, steps: int) -> tuple[Any, Any]:
    """Teach the agent of a number."""
    set_seed(number)
    words = [*map(str, range(1, NUMBERS + 1)), "higher", "lower"]
    tokenizer = tiny_tokenizer([PROMPT], vocab_size=300, markers=words)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "initializer_range": 0.1}
    model = Qwen2ForCausalLM(tiny_config(tokenizer, **sizes))
    games = ([careless_game() for _ in range(32)] for _ in range(steps))
    imitate(model, tokenizer, games, itertools.repeat(5e-3))
    return model, tokenizer


TASKS = {
    "guess": Task(
        agent=taught("guess", teach, steps=300),
        rows=lambda *_: ROWS * 64,
        player={"environment_factory": GuessEnv},
        # The tutorial's.
        args={
            "learning_rate": 4e-3,
            "lr_scheduler_type": "linear",
            "num_iterations": 2,
            "max_turns": GUESSES,
            "max_turn_tokens": 4,
            "max_completion_length": 64,
        },
        critic={"critic_learning_rate": 1e-3},
        episodes=128,
        rollouts=80,
        held_out=lambda *_: ROWS * 40,
        agents=3,
    )
}
