"""Save the log of a run during training, so that `trl-stppo plot` can read it even after a kill."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from itertools import chain, count
from pathlib import Path

from transformers import TrainerCallback, TrainerState, TrainingArguments

from .runs import FORMAT, METRICS_FILE, Entry, read_run

logger = logging.getLogger(__name__)


class MetricsFile(TrainerCallback):
    """Callback that appends every entry of `log_history` to `metrics.jsonl` in the output directory.

    Entries of evaluations before the training are put before the `log_history` that upstream begins then. A
    resumed run first restores the file to the log of its checkpoint, so that no entry is there twice. The
    file of an earlier run becomes `metrics.previous.jsonl`, `metrics.previous-2.jsonl` and so on. If the disk
    is full, the file ends with a warning and the training goes on. `task` returns names of model, environment
    and data.
    """

    def __init__(self, task: Callable[[], Mapping[str, str]] = dict) -> None:
        self._task = task
        self._path: Path | None = None
        self._before: list[Entry] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: object, **kwargs: object
    ) -> None:
        """Begin `metrics.jsonl` with the settings and the log so far."""
        self._path, early, self._before = None, self._before, []
        state.log_history[:0] = [] if state.global_step else early
        if not state.is_world_process_zero:
            return
        path = Path(args.output_dir) / METRICS_FILE
        head = {"format": FORMAT, "settings": {**changed_settings(args), **self._task()}}
        head["steps_per_rollout"] = getattr(args, "steps_per_rollout", 1)
        try:
            if state.global_step > 0:
                before = read_run(path).resumed if path.is_file() else []
                head["resumed"] = [s for s in before if s < state.global_step] + [state.global_step]
            path.parent.mkdir(parents=True, exist_ok=True)
            if state.global_step == 0 and path.is_file():
                os.replace(path, earlier := _free_name(path))
                logger.warning(
                    "`output_dir=%s` holds an earlier run. Its log is now %s; new checkpoints replace "
                    "those of the same step.",
                    path.parent,
                    earlier.name,
                )
            aside = path.with_name(f".{path.name}.writing")
            aside.write_text(_lines([head, *state.log_history]), encoding="utf-8")
            os.replace(aside, path)
            self._path = path
        except (OSError, ValueError) as error:
            self._give_up(path, error)

    def on_log(self, _: object, state: TrainerState, *__: object, **kwargs: object) -> None:
        """Append the newest log entry in one write, so that a kill can damage only the last line."""
        if self._path is None or not state.log_history:
            self._before += [] if state.global_step else state.log_history[-1:]
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_lines([state.log_history[-1]]))
        except OSError as error:
            self._give_up(self._path, error)

    def _give_up(self, path: Path, error: Exception) -> None:
        self._path = None
        text = "%s cannot be written (%s); the run goes on without it. Checkpoints have the log."
        logger.warning(text, path, error)


def _free_name(path: Path) -> Path:
    """Return the first free path for the renamed log of an earlier run."""
    numbers = chain([""], (f"-{number}" for number in count(2)))
    places = (path.with_name(f"{path.stem}.previous{n}{path.suffix}") for n in numbers)
    return next(place for place in places if not place.exists())


def changed_settings(args: TrainingArguments) -> dict[str, object]:
    """Return variant, seed, and all settings that differ from their default, except `hub_token`."""
    trainer = type(args).__name__.removesuffix("Config").lower()
    variant = getattr(args, "variant", None) or trainer
    changed: dict[str, object] = {"variant": variant, "seed": args.seed}
    for spec in fields(args):
        value = getattr(args, spec.name)
        default = spec.default if spec.default_factory is MISSING else spec.default_factory()
        if spec.name.startswith("_") or spec.name == "hub_token" or value == default:
            continue
        if isinstance(value, (str, int, float, bool, list)):
            changed[spec.name] = value
    return changed


def _lines(entries: Iterable[Entry]) -> str:
    return "".join(json.dumps(_plain(entry), default=str) + "\n" for entry in entries)


def _plain(value: object) -> object:
    """Replace NaN and infinite numbers by None, also in nested dictionaries."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
