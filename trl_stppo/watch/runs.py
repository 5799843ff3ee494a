"""Reading what runs have logged: from their folders, also while they go on.

`metrics.jsonl` in a run's folder holds one line of settings and then the entries of `log_history`, as
they came. Runs without it (older ones, other trainers) are read from `trainer_state.json`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .figures import number

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
STATE_FILE = "trainer_state.json"
MANIFEST = "stppo_checkpoint.json"
FORMAT = 1
# Settings that runs may differ in and still be repetitions of each other.
PLACES = {
    *("seed", "data_seed", "output_dir", "run_name", "project", "hub_model_id", "logging_dir"),
    *("report_to", "resume_from_checkpoint", "live_view", "disable_tqdm", "full_determinism"),
    *("save_strategy", "save_steps", "save_total_limit", "push_to_hub", "trace_episodes"),
    *("trackio_static_space_id", "log_level", "eval_on_start"),
}
# Settings that a variant sets, or that only some variants have.
IMPLIED = {
    *("importance_sampling_level", "stabilizers", "clip_bias_power"),
    *("clip_bias_normalization", "clip_bias_target"),  # their names in 0.1.0
}
# Written down beside the settings: what is trained on what. Their values speak for themselves.
TASK = ("model", "environment", "dataset")


@dataclass(frozen=True)
class Run:
    """What one run has logged.

    Attributes:
        folder: of the run.
        history: entries of `log_history`, oldest first.
        settings: those of its configuration that differ from the default, and the names of `TASK`;
            empty where nobody has written them down.
        source: the file that was read.
    """

    folder: Path
    history: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)
    source: Path = Path()

    @property
    def name(self) -> str:
        """Of the folder."""
        return self.folder.resolve().name

    def without_places(self) -> dict[str, Any]:
        """The settings in which repetitions agree."""
        return {k: v for k, v in self.settings.items() if k not in PLACES}


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


def grouped(runs: Sequence[Run], by: Sequence[str] | None = None) -> dict[str, list[Run]]:
    """Runs that repeat each other, under a label.

    Args:
        runs: any.
        by: settings that tell groups apart; None for all but seeds, places and the like. An empty
            sequence leaves each run to itself.

    Returns:
        Groups in the order of their first run. The label is the variant, plus the settings in which
        groups differ beyond it; for runs that are alone, the folder where that tells them apart.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        chosen = run.without_places() if by is None else {key: run.settings.get(key) for key in by}
        alone = by == [] or (by is None and not run.settings)
        key = (
            str(run.folder.resolve()) if alone else json.dumps(chosen, sort_keys=True, default=str)
        )
        groups.setdefault(key, []).append(run)
    members = list(groups.values())
    labels = _labels(members, by)
    return dict(zip(labels, members, strict=True))


def _labels(groups: Sequence[Sequence[Run]], by: Sequence[str] | None) -> list[str]:
    """Short labels that differ."""
    heads = [group[0] for group in groups]
    if by:
        return [" ".join(_said(head, key) for key in by) for head in heads]
    labels = [head.name for head in heads]
    if by is None:
        names = differing(heads)
        labels = [
            " ".join([_variant(head), *(_said(head, key) for key in names)]) for head in heads
        ]
    if len(set(labels)) < len(labels):
        labels = [head.name for head in heads]
    return labels if len(set(labels)) == len(labels) else [str(head.folder) for head in heads]


def differing(runs: Sequence[Run]) -> list[str]:
    """Task and settings in which runs differ, but for what follows from their variants."""
    names = {key for run in runs for key in run.without_places()} - {"variant"}
    return [
        key
        for key in sorted(names, key=lambda key: (_rank(key), key))
        if any(
            len({json.dumps(run.settings.get(key), default=str) for run in some}) > 1
            for some in _comparable(runs, key)
        )
    ]


def _rank(key: str) -> int:
    return TASK.index(key) if key in TASK else len(TASK)


def _comparable(runs: Sequence[Run], key: str) -> list[list[Run]]:
    """Those of one variant where the setting is the variant's own, else all."""
    if key not in IMPLIED:
        return [list(runs)]
    variants = dict.fromkeys(map(_variant, runs))
    return [[run for run in runs if _variant(run) == variant] for variant in variants]


def _variant(run: Run) -> str:
    return str(run.settings.get("variant") or run.name)


def _said(run: Run, key: str) -> str:
    """One setting in a label."""
    if key in (*TASK, "variant") and key in run.settings:
        return str(run.settings[key])
    missing = "unknown" if key in TASK else "default"
    return f"{key}={run.settings.get(key, missing)}"
