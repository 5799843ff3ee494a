"""Reward functions in TRL's form for answers in Search-R1's protocol (docs/recipes.md).

    reward_funcs:
      - scripts.search.search_env.rewards:exact_match_reward
      - scripts.search.search_env.rewards:format_reward

They accept completions as strings or as conversations, never raise, and return a number in [0, 1], or None
for rows of another kind.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from .protocol import TAG, last_answer, read_turn, turns_of

__all__ = [
    "exact_match_reward",
    "f1_reward",
    "final_answer",
    "format_reward",
    "multiple_choice_reward",
]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Normalise an answer: NFC, lower case, single spaces, no ASCII punctuation, no English articles."""
    without_punctuation = unicodedata.normalize("NFC", text).lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", without_punctuation).split())


def comparable(text: str) -> str:
    """Return the normalised text, or the lower-cased text if the normalised text is empty.

    Without the second case, the answer "a" or "+" would match every empty prediction.
    """
    return normalize_answer(text) or " ".join(unicodedata.normalize("NFC", text).lower().split())


def exact_match(prediction: str, answers: Iterable[str]) -> bool:
    """Return whether the prediction equals one of the gold answers after normalisation.

    Texts that normalise to nothing match only themselves (see `comparable`); nothing matches "".
    """
    predicted = comparable(prediction)
    return bool(predicted) and any(predicted == comparable(answer) for answer in answers)


def f1_score(prediction: str, answers: Iterable[str]) -> float:
    """Return the best word-level F1 of the prediction with an answer, in [0, 1]; 0 without answers.

    Words are counted with repetition, after the normalisation of `exact_match`. An empty side scores 0.
    """
    predicted = Counter(comparable(prediction).split())
    best = 0.0
    for gold in (Counter(comparable(answer).split()) for answer in answers):
        # 2PR / (P + R) with P = common / predicted and R = common / gold.
        if common := (predicted & gold).total():
            best = max(best, 2.0 * common / (predicted.total() + gold.total()))
    return best


Choices = Mapping[str, str] | Sequence[str]

# A letter that is a word, then the rest: "B", "(b)", "**B.**", "B) text".
_LETTER = re.compile(r"""[\s(\[*_$"]*([A-Za-z])(?![^\W_])[\s)\]*_$".:,;]*(.*)""", re.DOTALL)


def letter_of(text: object, choices: Choices | None = None) -> str | None:
    """Return the upper-case letter that a text consists of, or None. It never raises.

    The text is only a letter ("B", "(b)", "B."), or a letter and the text of that choice ("B) text").

    Args:
        text: the answer; other types than strings choose nothing.
        choices: letter -> text, or texts in the order of letters; without them A to Z are allowed.
    """
    found = _LETTER.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    letter, texts = found[1].upper(), _by_letter(choices)
    if texts and letter not in texts:
        return None
    return letter if comparable(found[2]) in ("", texts.get(letter, "")) else None


def letter_match(prediction: object, answers: Iterable[str], choices: Choices | None = None) -> bool:
    """Return whether the prediction gives one of the letters `answers`."""
    chosen = letter_of(prediction, choices)
    return chosen is not None and chosen in {letter_of(gold, choices) for gold in answers}


def has_choices(choices: object) -> bool:
    """Return whether a row's `choices` has a text. Open questions may have None in that column."""
    return bool(_by_letter(choices))


def _by_letter(choices: object) -> dict[str, str]:
    """Return the normalised text of each choice by letter, without missing texts."""
    pairs: Iterable[tuple[object, object]] = ()
    if isinstance(choices, Mapping):
        pairs = choices.items()
    elif isinstance(choices, Sequence) and not isinstance(choices, str | bytes):
        pairs = zip(ascii_uppercase, choices, strict=False)
    return {str(k).upper(): comparable(str(text)) for k, text in pairs if text is not None}


def exact_match_reward(
    completions: Sequence[Any], answers: Any = None, choices: Any = None, **columns: Any
) -> list[float | None]:
    """Return 1 if the answer equals a gold answer after SQuAD's normalisation, else 0.

    Args:
        completions: strings, or lists of messages.
        answers: per row a list of gold answers, or a single answer; None for a row without gold answers.
        choices: per row the choices; `multiple_choice_reward` scores rows with choices.
        **columns: not used.

    Returns:
        One reward per completion; None for rows without answers and for rows with choices.
    """
    return _scores(completions, answers, choices, lambda answer, golds, _: exact_match(answer, golds))


def f1_reward(
    completions: Sequence[Any], answers: Any = None, choices: Any = None, **columns: Any
) -> list[float | None]:
    """Return SQuAD's F1 with the closest gold answer. For arguments and None see `exact_match_reward`."""
    return _scores(completions, answers, choices, lambda answer, golds, _: f1_score(answer, golds))


exact_match_reward.title = "EM"  # type: ignore[attr-defined]
f1_reward.title = "F1"  # type: ignore[attr-defined]


def multiple_choice_reward(
    completions: Sequence[Any], answers: Any = None, choices: Any = None, **columns: Any
) -> list[float | None]:
    """Return 1 if the answer is the gold letter, alone or with the text of its choice, else 0.

    Args:
        completions: strings, or lists of messages.
        answers: per row the gold letters; None for a row without gold letters.
        choices: per row the texts in order, or letter -> text; without the column A to Z are allowed.
        **columns: not used.

    Returns:
        One reward per completion; None for rows without answers, or without choices in that column.
    """
    return _scores(completions, answers, choices, letter_match, lettered=True)


def format_reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """Return the share of turns that follow the protocol; 0 for an episode without turns.

    Such a turn is `<think>..</think>` and then one `<search>..</search>`, or, in the last turn, one
    `<answer>..</answer>`, with words in each and nothing else around them. The opening `<think>` may be
    in the chat template, and the thought in `reasoning_content`.

    Args:
        completions: strings, with turns between `<information>` blocks, or lists of messages.
        **columns: not used.
    """
    return [_share_in_format(_turns(completion)) for completion in completions]


def final_answer(completion: Any) -> str | None:
    """Return the policy's final answer, stripped, or None if there is no answer. Never raises.

    In a conversation, it is in the last assistant message whose only action is an answer. In a string, it
    is the last complete `<answer>..</answer>` outside of `<think>` and `<information>`.
    """
    if isinstance(completion, str):
        return last_answer(completion)
    turns = [read_turn(turn) for turn in _turns(completion)]
    return next((turn.content for turn in reversed(turns) if turn.kind == "answer"), None)


def _turns(completion: Any) -> list[str]:
    """Return the texts of the policy's turns. A turn's `reasoning_content` becomes its opening thought."""
    if isinstance(completion, str):
        return turns_of(completion)
    if isinstance(completion, Mapping):
        completion = [completion]
    if not isinstance(completion, Sequence):
        return []
    turns = []
    for message in completion:
        if not isinstance(message, Mapping) or message.get("role") != "assistant":
            continue
        thought = message.get("reasoning_content")
        before = TAG.sub(" ", thought) if isinstance(thought, str) else ""
        before = f"<think>{before}</think>" if before.strip() else ""
        turns.append(before + _text(message.get("content")))
    return turns


def _text(content: Any) -> str:
    """Return the text of a message's content, a string or a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
        return ""
    texts = (part.get("text") for part in content if isinstance(part, Mapping))
    return "".join(text for text in texts if isinstance(text, str))


def _share_in_format(turns: list[str]) -> float:
    right = 0
    for number, turn in enumerate(turns, 1):
        found = read_turn(turn)
        right += found.tidy and found.kind == ("answer" if number == len(turns) else "search")
    return right / len(turns) if turns else 0.0


def _scores(
    completions: Sequence[Any],
    answers: Any,
    choices: Any,
    score: Callable[[str, list[str], Any], float],
    *,
    lettered: bool = False,
) -> list[float | None]:
    """Score the final answers by gold answers and choices.

    The score is None for a row without gold answers. If there is the column `choices`, it is also None for
    rows with choices (if `lettered` is False) or without choices (if `lettered` is True).
    """
    number = len(completions)
    golds = map(_as_texts, _per_row(answers, number))
    rows = zip(completions, golds, _per_row(choices, number), strict=True)
    return [
        float(score(final_answer(completion) or "", gold, texts))
        if gold and (choices is None or has_choices(texts) == lettered)
        else None
        for completion, gold, texts in rows
    ]


def _as_texts(value: Any) -> list[str]:
    values = [value] if isinstance(value, str | bytes) or not isinstance(value, Sequence) else value
    found = [str(v) for v in values if isinstance(v, str | int | float) and not isinstance(v, bool)]
    return list(filter(comparable, found))


def _per_row(values: Any, number: int) -> list[Any]:
    """Return a column as a list of `number` values: one value repeated, or a list padded with None."""
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        return [*values, *[None] * number][:number]
    return [values] * number
