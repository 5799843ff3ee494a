"""Guess a number in three guesses: the game that train_number_game.py teaches to a pretrained model."""

from __future__ import annotations

import random
from typing import Any

NUMBERS, GUESSES = 7, 3
SYSTEM = "Guess the number. Answer with one number."
# Tens of the ranges, such as 31 to 37; agents are evaluated on ranges that they have not been trained on.
TRAINED, HELD_OUT = (1, 3, 5, 7, 9), (2, 4, 6, 8)


def prompt(low: int) -> list[dict[str, str]]:
    """Return the messages that open a game."""
    task = f"It is from {low} to {low + NUMBERS - 1}."
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]


def rows(tens: tuple[int, ...], repetitions: int = 1) -> list[dict[str, Any]]:
    """Return a row per range and number."""
    lows = [10 * ten + 1 for ten in tens]
    games = [(low, low + i) for low in lows for i in range(NUMBERS)] * repetitions
    return [{"prompt": prompt(low), "low": low, "number": number} for low, number in games]


class NumberEnv:
    """Says whether the number is higher or lower; reward 1 for the number itself, else 0."""

    def reset(self, *, number: int, **row: Any) -> tuple[str, dict[str, Any]]:
        """Begin a game; the prompt has said all."""
        self._number, self._left = number, GUESSES
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Judge a guess; what is no number takes a guess too."""
        self._left -= 1
        text = action.strip().rstrip(".")
        guess = int(text) if text.isdecimal() else None
        found = guess == self._number
        answer = "no number" if guess is None else "higher" if guess < self._number else "lower"
        info = {"valid_action": guess is not None, "success": found}
        return answer, float(found), found, not found and self._left == 0, info


def careless_game(random_: random.Random) -> list[dict[str, list[dict[str, str]]]]:
    """Play a game that keeps to the range of the answers in two guesses of five; return a row per turn.

    The rows have the form that TRL's SFTTrainer takes, `prompt` and `completion`.
    """
    first = 10 * random_.choice(TRAINED) + 1
    low, high = first, first + NUMBERS - 1
    number, messages, turns = random_.randint(low, high), prompt(first), []
    for _ in range(GUESSES):
        narrow = random_.random() < 0.4
        guess = random_.randint(*((low, high) if narrow else (first, first + NUMBERS - 1)))
        said = {"role": "assistant", "content": str(guess)}
        turns.append({"prompt": [*messages], "completion": [said]})
        if guess == number:
            break
        higher = guess < number
        low, high = (max(low, guess + 1), high) if higher else (low, min(high, guess - 1))
        messages += [said, {"role": "user", "content": "higher" if higher else "lower"}]
    return turns
