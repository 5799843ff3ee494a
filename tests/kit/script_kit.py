"""Imports modules of scripts/ and benchmarks/ into a test; small data as prepare_data.py writes it."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
PLACES = ("", "search", "textworld", "verifier", "makers", "pretrained")
FOLDERS = (
    *(SCRIPTS / name for name in PLACES),
    ROOT / "benchmarks",
    ROOT / "benchmarks" / "studies",
)
DEMO = str(SCRIPTS / "configs" / "demo.yaml")
AGENT = str(SCRIPTS / "assets" / "search-agent")


@contextmanager
def scripts() -> Iterator[Any]:
    """Gives a function that imports a module of FOLDERS; forgets them all again at the end."""
    before = set(sys.modules)
    sys.path[:0] = map(str, FOLDERS)
    try:
        yield importlib.import_module
    finally:
        for folder in FOLDERS:
            sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if {*Path(getattr(sys.modules[name], "__file__", None) or "/").parents} & {*FOLDERS}:
                del sys.modules[name]


def question_rows(names: list[str], split: str) -> dict[str, list[Any]]:
    """Rows about the standard library, one of each data set in turn; every set has questions of its own."""
    from scripts.search.search_env.retrieval import stdlib_search_dataset

    rows = stdlib_search_dataset(split).take(len(names))  # type: ignore[arg-type]
    return {
        "prompt": [row["prompt"] for row in rows],
        "answers": [list(row["answers"]) for row in rows],
        "choices": [[] for _ in rows],
        "dataset": names,
        "id": [f"{split}-{i}" for i in range(len(rows))],
        "question": [row["prompt"][-1]["content"] for row in rows],
    }


def small_data(folder: Path, train: int = 64, test: list[str] | None = None) -> str:
    """A folder as prepare_data.py leaves it; returns its path."""
    folder.mkdir(parents=True)
    parts = {"train": ["nq"] * train, "test": test or ["nq", "hotpotqa"] * 8}
    for split, names in parts.items():
        rows = Dataset.from_dict(question_rows(names, split))
        rows.to_parquet(str(folder / f"{split}.parquet"))
    (folder / "report.json").write_text("{}")
    return str(folder)
