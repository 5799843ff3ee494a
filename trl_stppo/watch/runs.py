"""Reading what runs have logged: from their folders, also while they go on.

`metrics.jsonl` in a run's folder holds one line of settings and then the entries of `log_history`, as
they came. Runs without it (older ones, other trainers) are read from `trainer_state.json`.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .figures import number

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
STATE_FILE = "trainer_state.json"
MANIFEST = "stppo_checkpoint.json"
FORMAT = 1


@dataclass(frozen=True)
class Run:
    """What one run has logged.

    Attributes:
        folder: of the run.
        history: entries of `log_history`, oldest first.
        settings: those of its configuration that differ from the default, and the names of model,
            environment and dataset; empty if the file has none.
        source: the file that was read.
    """

    folder: Path
    history: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    source: Path = Path()


def read_run(path: str | Path) -> Run:
    """A run by its output directory, by one of its checkpoints, or by the file with its log.

    Args:
        path: of the folder or file.

    Returns:
        The run as far as it has come.

    Raises:
        FileNotFoundError: there is no such folder, or nothing was logged in it yet.
        ValueError: the log is damaged.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"`runs={path}` does not exist. Name the output_dir of a run, one of its checkpoints, or the "
            f"{METRICS_FILE} or {STATE_FILE} in it."
        )
    if path.is_file():
        return _read_file(path, path.parent)
    for source in _sources(path):
        run = _read_file(source, path)
        if run.history:
            return run
    raise FileNotFoundError(
        f"`runs={path}` holds no log: there is no {METRICS_FILE} with an entry, no {STATE_FILE}, and no "
        f"checkpoint-<step> folder with one. A run writes its first entry after `logging_steps` "
        f"optimizer steps; if it has only begun, wait for it, otherwise name another folder."
    )


def _sources(folder: Path) -> list[Path]:
    """Files that may hold the log, best first; a run that goes on has the newest checkpoint last."""
    checkpoints = sorted(
        folder.glob(f"checkpoint-*/{STATE_FILE}"), key=lambda file: file.stat().st_mtime
    )
    candidates = [folder / METRICS_FILE, folder / STATE_FILE, *reversed(checkpoints)]
    return [file for file in candidates if file.is_file()]


def _read_file(file: Path, folder: Path) -> Run:
    try:
        if file.suffix == ".jsonl":
            settings, history = _read_lines(file)
        else:
            settings = _settings_beside(file)
            history = list(json.loads(file.read_text(encoding="utf-8"))["log_history"])
        if not isinstance(settings, dict):
            raise TypeError(f"`settings` is {settings!r:.40}; it must be an object")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"`runs={file}` is no log of a run, or it is damaged ({type(error).__name__}: {error}). Name a "
            f"{METRICS_FILE}, a {STATE_FILE}, or a folder that holds one."
        ) from error
    dicts = [entry for entry in history if isinstance(entry, dict)]
    # Upstream's last entry of all, for one, has no step of its own.
    steps = [entry for entry in dicts if "step" in entry]
    whole = [entry for entry in steps if number(entry["step"]) is not None]
    if odd := len(history) - len(dicts) + len(steps) - len(whole):
        logger.warning("%s: %d damaged entries are left out.", file, odd)
    return Run(folder, whole, settings, file)


def _read_lines(file: Path) -> tuple[Any, list[Any]]:
    """Settings and entries, None for one that is damaged; a last line that is being written is left out."""
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    written = [line for line in lines[:-1] if line.strip()]
    if not written:
        return {}, []
    first, *entries = json.loads(written[0]), *map(_entry, written[1:])
    if first.get("format") != FORMAT:
        raise ValueError(f"format {first.get('format')!r}; this version reads {FORMAT}")
    return first["settings"], entries


def _entry(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _settings_beside(file: Path) -> dict[str, Any]:
    """What a checkpoint's manifest says of its run."""
    manifest = file.parent / MANIFEST
    if not manifest.is_file():
        return {}
    about = json.loads(manifest.read_text(encoding="utf-8"))
    identity = about.get("identity", {})
    known = {key: identity[key] for key in ("variant", "seed") if identity.get(key) is not None}
    return {**about.get("settings", {}), **known}
