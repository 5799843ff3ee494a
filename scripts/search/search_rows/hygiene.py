"""Removal of rows from a split: unusable rows, duplicates, questions of the evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Set

from search_env.rewards import comparable

from .readers import Question


def asked(question: Question) -> str:
    """Return the question, normalised as answers are: case, punctuation and articles do not count."""
    return comparable(question.question)


def clean(
    questions: Iterable[Question], seen: set[str], evaluation: Set[str] = frozenset()
) -> tuple[int, list[Question]]:
    """Return the number of rows read, and the usable rows, each once.

    Args:
        questions: of one split.
        seen: what earlier data sets of the same split hold; grows.
        evaluation: `asked` of all evaluation rows, which must not be trained on.
    """
    read, kept = 0, []
    for question in questions:
        read += 1
        text = asked(question)
        # Exams repeat their wording ("which of the following is true?") with other choices.
        key = "\n".join([text, *sorted(map(comparable, question.choices))])
        if text and question.answers and text not in evaluation and key not in seen:
            seen.add(key)
            kept.append(question)
    return read, kept
