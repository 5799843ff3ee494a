"""Reads the questions of one split through the `datasets` library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .readers import ID_COLUMNS, Question
from .sources import Source

if TYPE_CHECKING:
    from datasets import Dataset


def read_questions(
    source: Source, split: str, *, local: str | None = None, revision: str | None = None
) -> Iterator[Question]:
    """The questions of a split, in the order of its files, unusable ones included.

    Args:
        source: which data set.
        split: `"train"` or `"eval"`.
        local: a folder with copies of the repositories, in place of the Hub.
        revision: branch, tag or commit on the Hub.

    Raises:
        ValueError: the data set has no such split, or its files lack a column.
        FileNotFoundError: `local` has no such files.
        ConnectionError: the Hub could not be reached, or refused.
    """
    rows = _load(source, split, local, revision)
    columns = [name for name in rows.column_names if name in (*source.layout.columns, *ID_COLUMNS)]
    missing = [name for name in source.layout.columns if name not in columns]
    if missing:
        raise ValueError(
            f"{source.name}: {source.location(split, local, revision)} has no column "
            f"{', '.join(missing)}; found are {', '.join(rows.column_names)}. The files must have the "
            f"layout of {source.hub} on the Hub; pin a revision that has it, or correct the copy."
        )
    return map(source.layout.read, rows.select_columns(columns))


def _load(source: Source, split: str, local: str | None, revision: str | None) -> Dataset:
    from datasets import load_dataset

    location = source.location(split, local, revision)
    if local is not None:
        pattern = location.removeprefix(f"{local}/")
        if not any(Path(local).glob(pattern)):
            raise FileNotFoundError(
                f"{source.name}: no file matches {location}. The folder holds copies of the "
                f"repositories, here {source.hub} as {local}/{source.hub}; download it there, or "
                f"leave out `local` to load from the Hub."
            )
    try:
        return load_dataset(source.format(split), data_files={"train": location}, split="train")
    except Exception as error:
        if local is not None:
            raise ValueError(
                f"{source.name}: {location} cannot be read ({type(error).__name__}: {error}). "
                f"Replace the file by a whole copy."
            ) from error
        raise ConnectionError(
            f"{source.name}: {location} cannot be loaded ({type(error).__name__}: {error}). This needs "
            f"the Hub: check the network and HF_HUB_OFFLINE. If the repository has changed, pin a "
            f"revision that has the file (--revision {source.hub}=..). Without network, download "
            f"{source.hub} elsewhere into DIR/{source.hub} and pass local (--local DIR)."
        ) from error
