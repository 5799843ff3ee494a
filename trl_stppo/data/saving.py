"""Writes prepared rows to a folder that `load_dataset` reads."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from .mixing import Prepared

if TYPE_CHECKING:
    from datasets import Features

# `load_dataset` takes the splits from the names, and passes over the report.
FILES = {"train": "train.parquet", "eval": "test.parquet"}
REPORT = "report.json"


def save(prepared: Prepared, output: str | Path, *, overwrite: bool = False) -> Path:
    """Write `train.parquet`, `test.parquet` and `report.json`, all of them or none.

    Args:
        prepared: what `prepare` returned; a split without rows gets no file.
        output: the folder, which `load_dataset` then reads.
        overwrite: replace a folder that an earlier call wrote.

    Raises:
        FileExistsError: there is something that is not to be replaced.
        ValueError: no row is left.
    """
    folder = Path(output)
    if not any(prepared.rows.values()):
        raise ValueError("No row is left to write; the report says why rows were dropped.")
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if folder.is_file() or there - {*FILES.values(), REPORT} or (there and not overwrite):
        raise FileExistsError(
            f"{folder} exists. Choose another folder, or, if it holds nothing but an earlier result, "
            f"pass overwrite (--overwrite)."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    replaced = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    try:
        unfinished.mkdir()
        _write(prepared, unfinished)
        if there:
            folder.replace(replaced)
        unfinished.replace(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if replaced.exists() and not folder.exists():
            replaced.replace(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    return folder


def _write(prepared: Prepared, folder: Path) -> None:
    from datasets import Dataset

    for split, rows in prepared.rows.items():
        if rows:
            Dataset.from_list(rows, features=_features()).to_parquet(folder / FILES[split])
    (folder / REPORT).write_text(json.dumps(prepared.report, indent=2) + "\n")


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
