"""Reward functions in TRL's form for answers in Search-R1's protocol (docs/recipes.md).

    reward_funcs:
      - trl_stppo.recipes.search.rewards:exact_match_reward
      - trl_stppo.recipes.search.rewards:format_reward

All of them take completions as strings or as conversations, never raise, whatever the policy wrote,
and pay a number in [0, 1], or None for a row that is not theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .choices import has_choices, letter_match
from .squad import comparable, exact_match, f1_score
from .tags import TAG, last_answer, read_turn, turns_of


def exact_match_reward(
    completions: Sequence[Any], answers: Any = None, choices: Any = None, **columns: Any
) -> list[float | None]:
    """1 where the answer equals a gold answer after SQuAD's normalisation, else 0.

    Args:
        completions: strings, or lists of messages.
        answers: per row a list of gold answers, or one; None for a row without any.
        choices: per row the choices; rows that have some are left to `multiple_choice_reward`.
        **columns: not used.

    Returns:
        One reward per completion; None for rows without answers and for rows with choices.
    """
    return _open_question(completions, answers, choices, lambda *sides: float(exact_match(*sides)))


def f1_reward(
    completions: Sequence[Any], answers: Any = None, choices: Any = None, **columns: Any
) -> list[float | None]:
    """The words that the answer shares with the closest gold answer, as SQuAD's F1.

    Arguments and what is returned are those of `exact_match_reward`.
    """
    return _open_question(completions, answers, choices, f1_score)


# What tables call them (docs/evaluation.md).
exact_match_reward.title = "EM"  # type: ignore[attr-defined]
f1_reward.title = "F1"  # type: ignore[attr-defined]


def multiple_choice_reward(
    completions: Sequence[Any], answers: Any = None, choices: Any = None, **columns: Any
) -> list[float | None]:
    """1 where the answer chooses the gold letter, else 0; choosing two is choosing none.

    Args:
        completions: strings, or lists of messages.
        answers: per row the gold letters or texts; None for a row without any.
        choices: per row the texts in order, or letter -> text; without the column every letter from
            A to Z is allowed.
        **columns: not used.

    Returns:
        One reward per completion; None for rows without answers, and for rows without choices where
        there is such a column.
    """
    rows = _per_row(choices, len(completions))
    rewards: list[float | None] = []
    for completion, golds, texts in zip(
        completions, _gold(answers, len(completions)), rows, strict=True
    ):
        if not golds or (choices is not None and not has_choices(texts)):
            rewards.append(None)
        else:
            rewards.append(float(letter_match(final_answer(completion), golds, texts)))
    return rewards


def format_reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
    """The share of turns that keep the protocol.

    A turn keeps it if it is `<think>..</think>` and then one `<search>..</search>`, or, in the last
    turn, one `<answer>..</answer>`, with words in each and nothing else around them; the opening
    `<think>` may have been the chat template's. So 1 is paid
    for an episode that keeps it throughout and ends in an answer, and 0 for one without turns. A
    template that returns the thought apart, as `reasoning_content`, is understood.

    Args:
        completions: strings, whose turns stand between `<information>` blocks, or lists of messages.
        **columns: not used.
    """
    return [_share_in_format(_turns(completion)) for completion in completions]


def final_answer(completion: Any) -> str | None:
    """What the policy answered, stripped; None if it did not.

    In a conversation that is the last assistant message which `SearchEnv` takes for an answer: one
    action in it, outside of thoughts. In a string, whose turns cannot be told apart, it is the last
    complete `<answer>..</answer>` outside of `<think>` and `<information>`. Never raises.
    """
    if isinstance(completion, str):
        return last_answer(completion)
    said = (read_turn(turn) for turn in _turns(completion))
    return next((turn.content for turn in reversed([*said]) if turn.kind == "answer"), None)


def _turns(completion: Any) -> list[str]:
    """What the policy said, turn by turn; a thought that came apart is put before its turn."""
    if isinstance(completion, str):
        return turns_of(completion)
    if isinstance(completion, Mapping):
        completion = [completion]
    if not isinstance(completion, Sequence):
        return []
    said = [m for m in completion if isinstance(m, Mapping) and m.get("role") == "assistant"]
    turns = []
    for message in said:
        thought = message.get("reasoning_content")
        before = TAG.sub(" ", thought) if isinstance(thought, str) else ""
        before = f"<think>{before}</think>" if before.strip() else ""
        turns.append(before + _text(message.get("content")))
    return turns


def _text(content: Any) -> str:
    """A message's content: a string, or a list of parts of which the texts count."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
        return ""
    texts = (part.get("text") for part in content if isinstance(part, Mapping))
    return "".join(text for text in texts if isinstance(text, str))


def _share_in_format(turns: list[str]) -> float:
    kept = 0
    for number, turn in enumerate(turns, 1):
        found = read_turn(turn)
        kept += found.tidy and found.kind == ("answer" if number == len(turns) else "search")
    return kept / len(turns) if turns else 0.0


def _open_question(
    completions: Sequence[Any],
    answers: Any,
    choices: Any,
    score: Callable[[str, Iterable[str]], float],
) -> list[float | None]:
    number = len(completions)
    rewards: list[float | None] = []
    for completion, golds, texts in zip(
        completions, _gold(answers, number), _per_row(choices, number), strict=True
    ):
        theirs = not golds or has_choices(texts)
        rewards.append(None if theirs else score(final_answer(completion) or "", golds))
    return rewards


def _gold(answers: Any, number: int) -> list[list[str]]:
    """The usable gold answers of every row."""
    return [_as_texts(row) for row in _per_row(answers, number)]


def _as_texts(value: Any) -> list[str]:
    if value is None or isinstance(value, bool | Mapping):
        return []
    if isinstance(value, str):
        return [value] if comparable(value) else []
    if isinstance(value, int | float):
        return [str(value)]
    if not isinstance(value, Iterable):
        return []
    return [text for entry in value if not isinstance(entry, list) for text in _as_texts(entry)]


def _per_row(values: Any, number: int) -> list[Any]:
    """A column of so many rows; one value for all where it is no column, None where it ends."""
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        return [*values, *[None] * number][:number]
    return [values] * number
