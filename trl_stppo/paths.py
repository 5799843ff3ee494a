"""Paths on this machine, in contrast to names on the Hub."""

import re
from pathlib import Path

# Subfolder of an agent or a checkpoint with the critic.
CRITIC_FOLDER = "critic"
ROWS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def check_name(field: str, name: object) -> None:
    """Raise FileNotFoundError if a name can only be a path (`./a`, `runs/a`, `a/b/c`) and does not exist."""
    if not isinstance(name, str) or Path(name).exists():
        return
    is_hub_id = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) and Path(name).suffix not in ROWS
    if not is_hub_id or name.startswith("runs/"):
        raise FileNotFoundError(f"`{field}={name}` is no file or folder (in {Path.cwd()}).")
