"""Index folders that are either complete or not there: built aside, renamed at the end."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trl_stppo.errors import IndexFolderError

MANIFEST = "index.json"
FORMAT = 1


@contextmanager
def new_folder(target: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to build in; on success it becomes `target`, on an error it is removed.

    A killed build leaves a folder `.NAME.building-PID` without a manifest beside the target.

    Args:
        target: where the index is to be.
        overwrite: replace what is there, once the new index is complete.

    Raises:
        FileExistsError: there is something, and `overwrite` is off.
    """
    target = Path(target).absolute()
    if target.exists() and not overwrite:
        raise FileExistsError(
            f"{target} exists. Name another folder, or replace it with overwrite=True."
        )
    building = target.with_name(f".{target.name}.building-{os.getpid()}")
    building.mkdir(parents=True)
    try:
        yield building
        replaced = target.with_name(f".{target.name}.replaced-{os.getpid()}")
        if target.exists():
            target.rename(replaced)
        building.rename(target)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def write_manifest(folder: Path, kind: str, settings: dict[str, Any]) -> None:
    """Declare the folder complete: what it is, how it was made, and the size of every file."""
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    content = {"format": FORMAT, "kind": kind, "settings": settings, "files": sizes}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2))


def read_manifest(folder: str | Path, kind: str) -> dict[str, Any]:
    """The settings of a complete index.

    Raises:
        IndexFolderError: no index, one of another kind, or one with missing or cut files.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise IndexFolderError(
            f"{folder} is no folder. Build an index there with scripts/build_index.py."
        )
    try:
        content = json.loads((folder / MANIFEST).read_text())
        found = (content["format"], content["kind"])
        settings, files = dict(content["settings"]), dict(content["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IndexFolderError(
            f"{folder} has no readable {MANIFEST} ({type(error).__name__}), which is written last: "
            "it is no index, or one whose building was interrupted. Build it again."
        ) from error
    if found != (FORMAT, kind):
        raise IndexFolderError(
            f"{folder} holds an index of kind {found[1]!r}, format {found[0]}; needed is kind "
            f"{kind!r}, format {FORMAT}. Open it as {found[1]!r}, or build it again."
        )
    for name, size in files.items():
        path = folder / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            raise IndexFolderError(
                f"{path} has {actual if actual is not None else 'no'} bytes; the index was completed "
                f"with {size}. The folder is damaged or was copied in part. Build or copy it again."
            )
    return settings
