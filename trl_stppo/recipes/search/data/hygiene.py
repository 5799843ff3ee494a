"""What may not be in a split: unusable rows, duplicates, questions of the evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from trl_stppo.recipes.search.squad import comparable

from .readers import Question


@dataclass
class Counts:
    """What became of the rows of one split; `read` is the sum of all others.

    Attributes:
        read: rows in the files.
        without_question, without_answer: unusable rows.
        duplicates: rows like an earlier one of the same split.
        in_evaluation: training rows that ask what some evaluation row asks.
        over_limit: left out by the limit of rows.
        kept: what is written.
    """

    read: int = 0
    without_question: int = 0
    without_answer: int = 0
    duplicates: int = 0
    in_evaluation: int = 0
    over_limit: int = 0
    kept: int = 0

    def as_dict(self) -> dict[str, int]:
        """By name."""
        return asdict(self)


def asked(question: Question) -> str:
    """What is asked, normalised as answers are: case, punctuation and articles do not count."""
    return comparable(question.question)


def clean(
    questions: Iterable[Question],
    seen: set[str],
    counts: Counts,
    evaluation: frozenset[str] | set[str] = frozenset(),
) -> list[Question]:
    """The usable questions, each once.

    Args:
        questions: of one split.
        seen: what earlier data sets of the same split hold; grows.
        counts: filled in.
        evaluation: `asked` of all evaluation rows, which must not be trained on.
    """
    kept = []
    for question in questions:
        counts.read += 1
        text = asked(question)
        # Exams repeat their wording ("which of the following is true?") with other choices.
        key = "\n".join([text, *sorted(map(comparable, question.choices))])
        if not text:
            counts.without_question += 1
        elif not question.answers:
            counts.without_answer += 1
        elif text in evaluation:
            counts.in_evaluation += 1
        elif key in seen:
            counts.duplicates += 1
        else:
            seen.add(key)
            kept.append(question)
    counts.kept = len(kept)
    return kept
