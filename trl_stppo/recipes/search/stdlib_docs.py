"""Corpus and questions on Python 3.11's library, made by scripts/makers/stdlib_questions.py."""

import gzip
import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trl_stppo.recipes.search.retrieval import Passage

if TYPE_CHECKING:
    import datasets

Split = Literal["train", "test"]


def _lines(name: str) -> list[Any]:
    with gzip.open(Path(__file__).parent / "stdlib" / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


@lru_cache(maxsize=1)
def passages() -> tuple[Passage, ...]:
    """Return the corpus: one short passage per documented name of the library."""
    return tuple(Passage(*line) for line in _lines("passages"))


def questions(split: Split) -> list[dict[str, Any]]:
    """Return a split's rows, with prompt (one user message), answers, hops (1 or 2), kind and name.

    No name is in both splits.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split is {split!r}; allowed are 'train' and 'test'.")
    return _lines(split)


def stdlib_search_dataset(split: Split) -> "datasets.Dataset":
    """Return the questions of a split as a data set for `SearchEnv`."""
    import datasets

    return datasets.Dataset.from_list(questions(split))
