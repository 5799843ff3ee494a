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
    """Write the log to a file, and print lines in place of upstream's progress bar and dictionaries.

    `names` returns the names of model, environment and data set; `engines` report their progress.
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


class Loggable(TrainerCallback):
    """Callback that removes None and non-finite values from the log, or that restores them from `left_out`.

    A metric without an episode in the batch is None in the log, and TensorBoard and MLflow warn of it each
    time. NaN and infinities are not points of a curve. `log_history` keeps all values.
    """

    def __init__(self, left_out: dict[str, Any], *, restores: bool = False) -> None:
        self._left_out, self._restores = left_out, restores

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Remove from `logs`, in place, values that are neither finite numbers nor text; or restore them."""
        logs = {} if logs is None else logs
        if self._restores:
            logs.update(self._left_out)
            return
        self._left_out.clear()
        for name, value in [*logs.items()]:
            if value is None or (isinstance(value, float) and not math.isfinite(value)):
                self._left_out[name] = logs.pop(name)


def shield_integrations(callbacks: list[Any]) -> None:
    """Insert a `Loggable` before the integrations, and one that restores after them, in place."""
    where = [
        i
        for i, callback in enumerate(callbacks)
        if type(callback).__module__.startswith("transformers.integrations")
    ]
    if where:
        left_out: dict[str, Any] = {}
        callbacks.insert(where[-1] + 1, Loggable(left_out, restores=True))
        callbacks.insert(where[0], Loggable(left_out))
