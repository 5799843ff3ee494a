"""Writes down what is logged as the run goes, for `trl-stppo plot` and for after a kill."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from itertools import chain, count
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..redaction import is_secret, redacted
from .runs import FORMAT, METRICS_FILE

logger = logging.getLogger(__name__)


class MetricsFile(TrainerCallback):
    """Appends every entry of `log_history` to `metrics.jsonl` in the output directory.

    A resumed run first puts back what its checkpoint knows, so that entries after it are not there
    twice. The file of another run that began in the same folder is kept as `metrics.previous.jsonl`, or
    `metrics.previous-2.jsonl` and so on.
    A disk that is full costs the file's rest, and a warning, not the training.

    Args:
        task: gives names of what is trained on what, when a training begins; `trl-stppo plot` tells
            runs apart by them as by settings.
    """

    def __init__(self, task: Callable[[], Mapping[str, str]] = dict) -> None:
        self._task = task
        self._path: Path | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the file."""
        self._path = None
        if not state.is_world_process_zero:
            return
        path = Path(args.output_dir) / METRICS_FILE
        head = {"format": FORMAT, "settings": {**changed_settings(args), **self._task()}}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if state.global_step == 0 and path.is_file():
                os.replace(path, _free_name(path))
            aside = path.with_name(f".{path.name}.writing")
            aside.write_text(_lines([head, *state.log_history]), encoding="utf-8")
            os.replace(aside, path)
            self._path = path
        except OSError as error:
            self._give_up(path, error)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Append; in one write, so that a kill leaves a last line that readers can tell."""
        if self._path is None or not state.log_history:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_lines([state.log_history[-1]]))
        except OSError as error:
            self._give_up(self._path, error)

    def _give_up(self, path: Path, error: OSError) -> None:
        self._path = None
        logger.warning(
            "%s cannot be written (%s); the run goes on without it, and its log is in the checkpoints.",
            path,
            error,
        )


def _free_name(path: Path) -> Path:
    """Where an earlier run's file is kept: the first name that nothing has yet."""
    numbers = chain([""], (f"-{number}" for number in count(2)))
    places = (path.with_name(f"{path.stem}.previous{n}{path.suffix}") for n in numbers)
    return next(place for place in places if not place.exists())


def changed_settings(args: Any) -> dict[str, Any]:
    """Variant, seed, and fields that differ from their default; secrets are left out."""
    trainer = type(args).__name__.removesuffix("Config").lower()
    changed: dict[str, Any] = {
        "variant": getattr(args, "variant", None) or trainer,
        "seed": args.seed,
    }
    for spec in fields(args):
        value = getattr(args, spec.name)
        if spec.default_factory is not MISSING:
            default = spec.default_factory()
        else:
            default = None if spec.default is MISSING else spec.default
        if spec.name.startswith("_") or is_secret(spec.name) or value == default:
            continue
        if isinstance(value, (str, int, float, bool, list)):
            changed[spec.name] = value
    return changed


def _lines(entries: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(_plain(redacted(entry)), default=str) + "\n" for entry in entries)


def _plain(value: Any) -> Any:
    """With null for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
