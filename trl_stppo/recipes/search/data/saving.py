"""Writes prepared rows to a folder that `load_dataset` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from trl_stppo.recipes.search.files import built_aside, check_target

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
        OSError: the folder cannot be written.
    """
    folder = Path(output)
    if not any(prepared.rows.values()):
        raise ValueError("No row is left to write; the report says why rows were dropped.")
    with built_aside(folder, _owned, overwrite=overwrite) as building:
        _write(prepared, building)
    return folder


def check_output(output: str | Path, *, overwrite: bool = False) -> None:
    """Make sure that `save` may write there, before anything is loaded.

    Args:
        output: the folder.
        overwrite: as for `save`.

    Raises:
        FileExistsError: there is something that is not to be replaced.
    """
    check_target(output, _owned, overwrite=overwrite)


def _owned(folder: Path) -> set[str]:
    """The files of an earlier result, which has a report."""
    report = json.loads((folder / REPORT).read_text())
    if not isinstance(report, dict) or "settings" not in report:
        raise ValueError(f"{REPORT} is another program's")
    return {*FILES.values(), REPORT}


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
