"""One reader per layout: a row as its data set has it -> a `Question`.

A reader is lenient about a single row, since real data has holes: what cannot be used comes back
with no answers, and is counted and dropped later. A missing column is another matter; `loading.py`
checks them before the first row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from search_env.rewards import comparable

Row = Mapping[str, Any]
PUBMEDQA_CHOICES = ("yes", "no", "maybe")


@dataclass(frozen=True)
class Question:
    """One question in the form that all data sets share.

    Attributes:
        question: as asked, without choices.
        answers: accepted answers, the gold letter where there are choices; empty if unusable.
        choices: texts in the order of their letters.
        context: a text that comes with the question.
        id: of the data set; "" where it has none.
    """

    question: str
    answers: tuple[str, ...]
    choices: tuple[str, ...] = ()
    context: str = ""
    id: str = ""


@dataclass(frozen=True)
class Layout:
    """The columns that a reader needs, and the reader."""

    columns: tuple[str, ...]
    read: Callable[[Row], Question]


def clean_answers(values: Any) -> tuple[str, ...]:
    """The usable ones, stripped, each once, in order; numbers as text."""
    listed = [values] if isinstance(values, str | int | float) else values
    if not isinstance(listed, Iterable) or isinstance(listed, Mapping):
        return ()
    texts = (str(v).strip() for v in listed if isinstance(v, str | int | float))
    return tuple(dict.fromkeys(text for text in texts if comparable(text)))


def _text(value: Any) -> str:
    return " ".join(value.split()) if isinstance(value, str) else ""


def _id(row: Row) -> str:
    found = (row[name] for name in ID_COLUMNS if row.get(name) is not None)
    return str(next(found, ""))


# Not every copy of a data set has one, and they differ in its name.
ID_COLUMNS = ("id", "_id", "question_id", "pubid")


def _plain(question: str, *answers: str) -> Layout:
    """A column with the question and columns with an answer or a list of them."""

    def read(row: Row) -> Question:
        found = [a for name in answers for a in clean_answers(row[name])]
        return Question(_text(row[question]), clean_answers(found), id=_id(row))

    return Layout((question, *answers), read)


def _chosen(row: Row, choices: Iterable[Any], gold: int | None, context: str = "") -> Question:
    """With choices; unusable if one of them is empty, or the gold one is none of them."""
    texts = tuple(_text(choice) for choice in choices)
    usable = len(texts) > 1 and all(texts) and gold is not None and 0 <= gold < len(texts)
    answers = (ascii_uppercase[gold],) if usable and gold is not None else ()
    return Question(_text(row["question"]), answers, texts, context, _id(row))


def _medqa(row: Row) -> Question:
    options = row["options"] if isinstance(row["options"], Mapping) else {}
    letters = sorted(letter for letter, text in options.items() if text is not None)
    gold = letters.index(row["answer_idx"]) if row["answer_idx"] in letters else None
    return _chosen(row, [options[letter] for letter in letters], gold)


def _medmcqa(row: Row) -> Question:
    gold = row["cop"] if isinstance(row["cop"], int) else None  # -1: hidden
    return _chosen(row, [row[name] for name in ("opa", "opb", "opc", "opd")], gold)


def _pubmedqa(row: Row) -> Question:
    decision = _text(row["final_decision"]).lower()
    gold = PUBMEDQA_CHOICES.index(decision) if decision in PUBMEDQA_CHOICES else None
    context = row["context"] if isinstance(row["context"], Mapping) else {}
    abstract = " ".join(filter(None, map(_text, context.get("contexts") or [])))
    return _chosen(row, PUBMEDQA_CHOICES, gold, abstract)


FLASHRAG = _plain("question", "golden_answers")
MEDQA = Layout(("question", "options", "answer_idx"), _medqa)
MEDMCQA = Layout(("question", "opa", "opb", "opc", "opd", "cop"), _medmcqa)
PUBMEDQA = Layout(("question", "context", "final_decision"), _pubmedqa)
