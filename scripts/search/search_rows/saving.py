"""Writes prepared rows to a folder that `load_dataset` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from .mixing import Prepared

if TYPE_CHECKING:
    from datasets import Features

# `load_dataset` takes the splits from the names, and passes over the report.
FILES = {"train": "train.parquet", "eval": "test.parquet"}
REPORT = "report.json"


def save(prepared: Prepared, output: str | Path) -> Path:
    """Write `train.parquet`, `test.parquet` and `report.json` into a new folder.

    Args:
        prepared: what `prepare` returned; a split without rows gets no file.
        output: the folder, which `load_dataset` then reads.

    Raises:
        FileExistsError: it is there.
        ValueError: no row is left.
    """
    from datasets import Dataset

    folder = Path(output)
    if not any(prepared.rows.values()):
        raise ValueError("No row is left to write; the report has the rows that were read.")
    check_output(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in prepared.rows.items():
        if rows:
            Dataset.from_list(rows, features=_features()).to_parquet(folder / FILES[split])
    (folder / REPORT).write_text(json.dumps(prepared.report, indent=2) + "\n")
    return folder


def check_output(output: str | Path) -> None:
    """Raise a FileExistsError if `save` may not write there: a file, or a folder with something in it."""
    folder = Path(output)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists; name another folder, or remove it.")


def _features() -> Features:
    """Named, so that splits agree even where one of them has no choices at all."""
    from datasets import Features, List, Value

    text = Value("string")
    return Features(
        {
            "prompt": List({"role": text, "content": text}),
            "answers": List(text),
            "choices": List(text),
            "dataset": text,
            "id": text,
            "question": text,
        }
    )
