"""Index folders: how they come about, and what says that one is complete."""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from trl_stppo.errors import IndexFolderError
from trl_stppo.recipes.search.files import built_aside

MANIFEST = "index.json"
FORMAT = 1


def new_folder(
    target: str | Path, kind: str, *, overwrite: bool = False
) -> AbstractContextManager[Path]:
    """A folder to build an index in; on success it becomes `target`, on an error it is removed.

    Args:
        target: where the index is to be.
        kind: of the index; one of another kind is not replaced.
        overwrite: replace an index that is there, once the new one is complete.

    Raises:
        FileExistsError: there is something that is not to be replaced.
    """

    def owned(folder: Path) -> set[str]:
        try:
            found, _, files = _read(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"no readable {MANIFEST}: {type(error).__name__}") from error
        if found[1] != kind:
            raise ValueError(f"an index of kind {found[1]!r}, not {kind!r}")
        return {MANIFEST, *files}

    return built_aside(target, owned, overwrite=overwrite)


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
