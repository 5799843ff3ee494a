"""Create index folders, and check that they are complete."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MANIFEST = "index.json"
FORMAT = 1


class IndexFolderError(ValueError):
    """A folder without a complete search index of the right kind and settings."""


@contextmanager
def new_folder(target: str | Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `target` on success and removed on an error."""
    target = Path(target).absolute()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not an empty folder.")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.building-", dir=target.parent) as folder:
        # A folder inside, which other users may read.
        building = Path(folder) / "new"
        building.mkdir()
        yield building
        building.rename(target)


def write_manifest(folder: Path, kind: str, settings: dict[str, Any]) -> None:
    """Mark an index folder as complete: write kind, settings and file sizes to `index.json`."""
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    content = {"format": FORMAT, "kind": kind, "settings": settings, "files": sizes}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2))


def read_manifest(folder: str | Path, kind: str) -> dict[str, Any]:
    """Return the settings of a complete index; raise `IndexFolderError` for any other folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise IndexFolderError(f"{folder} is no folder of an index.")
    try:
        content = json.loads((folder / MANIFEST).read_text())
        found = (content["format"], content["kind"])
        settings, files = dict(content["settings"]), dict(content["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IndexFolderError(
            f"{folder} has no readable {MANIFEST} ({type(error).__name__}): it is no complete index."
        ) from error
    if found != (FORMAT, kind):
        raise IndexFolderError(f"{folder}: format and kind are {found}; must be {(FORMAT, kind)}.")
    for name, size in files.items():
        path = folder / name
        actual = path.stat().st_size if path.is_file() else None
        if actual != size:
            raise IndexFolderError(f"{path}: size is {actual}; must be {size}.")
    return settings
