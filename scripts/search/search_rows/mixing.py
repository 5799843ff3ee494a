"""From names of data sets to clean rows of two splits, and a report of what was dropped."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .hygiene import asked, clean
from .loading import read_questions
from .prompts import as_row
from .readers import Question
from .sources import find_source


@dataclass
class Prepared:
    """Rows to write, and how they came about.

    Attributes:
        rows: of `"train"` and of `"eval"`.
        report: settings and, per split and data set, where it is from, rows read and rows kept.
    """

    rows: dict[str, list[dict[str, Any]]]
    report: dict[str, Any] = field(default_factory=dict)


def prepare(
    train: Sequence[str] = (),
    evaluation: Sequence[str] = (),
    *,
    local: str | None = None,
    revisions: Mapping[str, str] | None = None,
    max_train_rows: int | None = None,
    max_eval_rows: int | None = None,
    seed: int = 0,
    context: bool = True,
) -> Prepared:
    """Load, clean and mix data sets.

    No training row asks what a row of the named evaluation sets asks, whichever data set either is
    from, and whether or not that evaluation row is among the `max_eval_rows`.

    Args:
        train: names of data sets to train on.
        evaluation: names of data sets to evaluate on; a data set may be in both, with other rows.
        local: a folder with copies of the repositories, in place of the Hub.
        revisions: repository -> branch, tag or commit.
        max_train_rows: rows of each data set to train on at most, drawn with `seed`.
        max_eval_rows: likewise, to evaluate on.
        seed: for what is drawn and for the order of the training rows.
        context: whether PubMedQA's abstracts are part of the prompt.

    Raises:
        ValueError: nothing or something unknown is named, or files have another layout.
        FileNotFoundError: `local` lacks files.
        ConnectionError: the Hub cannot be reached.
    """
    if not train and not evaluation:
        raise ValueError("No data set is named. Give at least one to train on or to evaluate on.")
    for name, limit in (("max_train_rows", max_train_rows), ("max_eval_rows", max_eval_rows)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name} is {limit}; it must be at least 1, or left out for all rows.")
    for split, names in (("train", train), ("eval", evaluation)):
        for name in names:
            find_source(name).files(split)  # a mistake shows before anything is downloaded

    mixer = _Mixer(local, revisions or {}, seed, context)
    held_out = mixer.load("eval", evaluation, set(), max_eval_rows)
    rows = mixer.load("train", train, mixer.asked_in_evaluation, max_train_rows)
    random.Random(seed).shuffle(rows)
    settings = {
        "local": local,
        "seed": seed,
        "max_train_rows": max_train_rows,
        "max_eval_rows": max_eval_rows,
        "context": context,
    }
    report = {"settings": settings, **mixer.report}
    return Prepared({"train": rows, "eval": held_out}, report)


@dataclass
class _Mixer:
    local: str | None
    revisions: Mapping[str, str]
    seed: int
    context: bool
    report: dict[str, Any] = field(default_factory=dict)
    asked_in_evaluation: set[str] = field(default_factory=set)

    def load(
        self, split: str, names: Sequence[str], forbidden: set[str], limit: int | None
    ) -> list[dict[str, Any]]:
        """The rows of a split, and its part of the report."""
        rows: list[dict[str, Any]] = []
        seen: set[str] = set()
        self.report[split] = {}
        for name in dict.fromkeys(names):
            where = find_source(name)
            revision = None if self.local else self.revisions.get(where.hub)
            questions = read_questions(where, split, local=self.local, revision=revision)
            # Each evaluation set stays whole, so that its figure can be compared with others'.
            read, kept = clean(questions, seen if split == "train" else set(), forbidden)
            if split == "eval":
                self.asked_in_evaluation |= set(map(asked, kept))
            kept = self._limited(kept, name, split, limit)
            rows += [as_row(q, name, i, context=self.context) for i, q in enumerate(kept)]
            self.report[split][name] = {
                "from": where.location(split, self.local, revision),
                "read": read,
                "kept": len(kept),
            }
        return rows

    def _limited(self, kept: list[Question], name: str, split: str, limit: int | None) -> list[Question]:
        if limit is None or len(kept) <= limit:
            return kept
        # By name, so that what a data set gives does not depend on what else is loaded.
        chosen = random.Random(f"{self.seed}/{split}/{name}").sample(range(len(kept)), limit)
        return [kept[i] for i in sorted(chosen)]
