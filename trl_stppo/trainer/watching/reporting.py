"""Where logs go: the default of `report_to`, and what every integration can take."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainingArguments
from transformers.utils import is_in_notebook

AUTO = "auto"
# Upstream's integration passes arguments that older versions do not know.
TRACKIO_FROM = (0, 21)
# With one of these trackio sends what it logs elsewhere.
TRACKIO_REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


def resolve_report_to(args: TrainingArguments) -> None:
    """Replace "auto": trackio where it is installed and keeps to this machine, otherwise nothing.

    Whoever has not asked for a report gets none that leaves the machine or opens a port: a push to the
    Hub publishes no dashboard then, and a notebook, in which trackio would start one, has no report.
    """
    if args.report_to not in (AUTO, [AUTO]):
        return
    asked = args.trackio_space_id is not None or any(map(os.environ.get, TRACKIO_REMOTE))
    if asked or is_in_notebook() or not _usable_trackio():
        args.report_to = "none"
        return
    args.report_to = ["trackio"]
    if args.trackio_static_space_id is None:
        args.trackio_static_space_id = False


def _usable_trackio() -> bool:
    if importlib.util.find_spec("trackio") is None:
        return False
    try:
        parts = version("trackio").split(".")
    except PackageNotFoundError:
        return False
    return tuple(int(part) for part in parts[:2] if part.isdigit()) >= TRACKIO_FROM


def names_runs(args: TrainingArguments) -> bool:
    """Whether a run gets its name from us."""
    return args.run_name is None and args.report_to == ["trackio"]


@contextmanager
def named_run(args: TrainingArguments, run: str) -> Iterator[None]:
    """Have trackio know a run by a name that the run keeps when it is resumed.

    By itself it would make up another one. A name that is set stays; so does that of other integrations,
    which can go on with a run otherwise.

    Args:
        args: its `run_name` is what upstream passes on.
        run: that goes on.
    """
    given = args.run_name
    if names_runs(args):
        args.run_name = f"{Path(args.output_dir).absolute().name}-{run[:8]}"
    try:
        yield
    finally:
        args.run_name = given


class LoggableFigures(TrainerCallback):
    """Hands only numbers on to the integrations, between which and the other callbacks it stands.

    A figure that no episode of a batch has is None in the log, for which TensorBoard and MLflow warn
    each time; NaN and infinities are no points of a curve. `log_history` keeps them all.
    """

    def __init__(self) -> None:
        self.left_out: dict[str, Any] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Take out of `logs`, in place, what is no finite number and no text."""
        self.left_out = {
            name: value
            for name, value in (logs or {}).items()
            if value is None or (isinstance(value, float) and not math.isfinite(value))
        }
        for name in self.left_out:
            del logs[name]


class AllFigures(TrainerCallback):
    """Puts back what `LoggableFigures` has taken out; stands behind the integrations."""

    def __init__(self, before: LoggableFigures) -> None:
        self._before = before

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add to `logs`, in place."""
        if logs is not None:
            logs.update(self._before.left_out)


def shield_integrations(callbacks: list[Any]) -> None:
    """Put the two around the integrations among the callbacks, in place."""
    found = [
        i
        for i, c in enumerate(callbacks)
        if type(c).__module__.startswith("transformers.integrations")
    ]
    if found:
        before = LoggableFigures()
        callbacks.insert(found[-1] + 1, AllFigures(before))
        callbacks.insert(found[0], before)
