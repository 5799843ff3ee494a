"""Tell a path of this machine from a name on the Hub."""

from __future__ import annotations

import re
from pathlib import Path

# Endings of files with rows -> the loader that datasets has for them.
ROWS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def looks_like_path(name: str) -> bool:
    """Return whether a name can only be a path: `./agent`, `runs/agent`, `a/b/c`, `rows.jsonl`."""
    on_hub = _HUB_ID.fullmatch(name) and Path(name).suffix not in ROWS
    return not on_hub or name.startswith("runs/")


def check_name(field: str, name: object) -> None:
    """Raise FileNotFoundError if a name can only be a path, and nothing is there; pass other values."""
    if isinstance(name, str) and looks_like_path(name) and not Path(name).exists():
        raise FileNotFoundError(f"`{field}={name}` is no file or folder (in {Path.cwd()}).")
