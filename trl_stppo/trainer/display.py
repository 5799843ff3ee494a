"""Display of a running training: lines of metrics, sample episodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import CallbackHandler

from ..rollout.engine import RolloutEngine
from ..watch.lines import ProgressLines
from ..watch.metrics_file import MetricsFile


def install_callbacks(
    handler: CallbackHandler,
    names: Callable[[], dict[str, str]],
    why_padded: str | None,
    engines: Mapping[str, RolloutEngine],
) -> None:
    """Write the log to a file, and replace upstream's bar and printed dictionaries by lines of metrics.

    Args:
        handler: the trainer's callbacks.
        names: function that returns the names of model, environment and data set.
        why_padded: why forward passes are not packed, or None.
        engines: engines that report their progress, by a word for what they play.
    """
    shield_integrations(handler.callbacks)
    handler.add_callback(MetricsFile(names))
    # In a notebook the default callback is a third class, which shows a table.
    upstreams = ProgressCallback, PrinterCallback, DEFAULT_PROGRESS_CALLBACK
    callbacks = list(handler.callbacks)
    for callback in callbacks:
        if isinstance(callback, upstreams):
            handler.remove_callback(callback)
    lines = next((c for c in callbacks if isinstance(c, ProgressLines)), None)
    if lines is None:
        handler.add_callback(lines := ProgressLines())
    lines.task = names
    lines.passes = "packed" if why_padded is None else f"padded. {why_padded}"

    def on_progress(what: str, ended: int, episodes: int) -> None:
        # The user may have removed the callback since construction.
        if lines in handler.callbacks:
            lines.on_rollout(what, ended, episodes)

    for what, engine in engines.items():
        engine.on_progress = partial(on_progress, what)


class LoggableFigures(TrainerCallback):
    """Callback that runs before the integrations and removes None and non-finite values from the log.

    A metric without an episode in the batch is None in the log, and TensorBoard and MLflow warn of it each
    time. NaN and infinities are not points of a curve. `log_history` keeps all values.
    """

    def __init__(self) -> None:
        self.left_out: dict[str, Any] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Remove from `logs`, in place, values that are neither finite numbers nor text."""
        self.left_out = {
            name: value
            for name, value in (logs or {}).items()
            if value is None or (isinstance(value, float) and not math.isfinite(value))
        }
        for name in self.left_out:
            del logs[name]


class AllFigures(TrainerCallback):
    """Callback that runs after the integrations and restores the values that `LoggableFigures` removed."""

    def __init__(self, before: LoggableFigures) -> None:
        self._before = before

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the removed values to `logs` again, in place."""
        if logs is not None:
            logs.update(self._before.left_out)


def shield_integrations(callbacks: list[Any]) -> None:
    """Insert `LoggableFigures` before and `AllFigures` after the integrations, in place."""
    found = [
        i
        for i, c in enumerate(callbacks)
        if type(c).__module__.startswith("transformers.integrations")
    ]
    if found:
        before = LoggableFigures()
        callbacks.insert(found[-1] + 1, AllFigures(before))
        callbacks.insert(found[0], before)
