"""Episodes spelled out: ids as text with `[` and `]` for the chat markers, masks as digits.

rows("ab][u more][a c]")   token ids of the character tokenizer, `[` and `]` one token each
digits("111 00000000 11")  a mask, blanks ignored
"""

from collections.abc import Sequence
from typing import Any

from tests.kit.fakes import char_tokenizer

TOKENIZER = char_tokenizer()
MARKERS = {"[": "<|im_start|>", "]": "<|im_end|>"}
EOS = TOKENIZER.eos_token_id


def ids(text: str) -> list[int]:
    """One token per character."""
    return TOKENIZER.convert_tokens_to_ids([MARKERS.get(c, c) for c in text])


def text(tokens: Sequence[int]) -> str:
    """The inverse of `ids`."""
    back = {v: k for k, v in MARKERS.items()}
    return "".join(back.get(t, t) for t in TOKENIZER.convert_ids_to_tokens(list(tokens)))


def digits(mask: str) -> list[int]:
    """A mask from its digits."""
    return [int(c) for c in mask if c != " "]


class ScriptedEnv:
    """Answers with these step results, the last one again and again, and remembers what it was given."""

    def __init__(self, *steps: Any, opening: Any = ("", {})) -> None:
        self.steps, self.opening = steps, opening
        self.rows: list[dict[str, Any]] = []
        self.actions: list[str] = []

    def reset(self, **row: Any) -> Any:
        self.rows.append(row)
        self.actions = []
        return self.opening

    def step(self, action: str) -> Any:
        self.actions.append(action)
        return self.steps[min(len(self.actions), len(self.steps)) - 1]


class Echoing:
    """A tool environment whose tool says again what it is told."""

    def reset(self, **row: Any) -> Any:
        return None

    def e(self, x: str) -> str:
        """Say it again.\n\nArgs:\n    x: what."""
        return x


def going(observation: str, reward: float = 0.0, **info: Any) -> tuple:
    """A step after which the episode goes on."""
    return observation, reward, False, False, info


def done(reward: float = 0.0, **info: Any) -> tuple:
    """A step that ends the task."""
    return "ignored", reward, True, False, info
