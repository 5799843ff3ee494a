"""Index folders: how they come about, and what says that one is complete."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trl_stppo.errors import IndexFolderError

MANIFEST = "index.json"
FORMAT = 1


@contextmanager
def new_folder(target: str | Path) -> Iterator[Path]:
    """A folder to build an index in; on success it becomes `target`, on an error it is removed.

    Raises:
        FileExistsError: `target` is there, with something in it.
    """
    target = Path(target).absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(f"{target} exists; name another folder, or remove it.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{target.name}.building-", dir=target.parent
    ) as folder:
        # One inside of it, which others may read.
        building = Path(folder) / "new"
        building.mkdir()
        yield building
        building.rename(target)


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
            f"{folder} is no folder. Build an index there with scripts/search/build_index.py."
        )
    try:
        found, settings, files = _read(folder)
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


def _read(folder: Path) -> tuple[tuple[Any, Any], dict[str, Any], dict[str, Any]]:
    """Format and kind, settings, and sizes of the files, as the manifest has them."""
    content = json.loads((folder / MANIFEST).read_text())
    found = (content["format"], content["kind"])
    return found, dict(content["settings"]), dict(content["files"])
