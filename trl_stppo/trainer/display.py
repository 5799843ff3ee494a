"""Display of a running training: lines of metrics, sample episodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_callback import CallbackHandler

from ..rollout.engine import RolloutEngine
from ..watch.lines import ProgressLines
from ..watch.metrics_file import MetricsFile


def install_callbacks(
    handler: CallbackHandler,
    names: Callable[[], dict[str, str]],
    notes: tuple[str | None, str | None],
    engines: Mapping[str, RolloutEngine],
) -> None:
    """Write the log to a file, and print lines in place of upstream's progress bar and dictionaries.

    `names` returns the names of model, environment and data set. `notes` say why passes are padded, and which
    weights steps do not move. `engines` report their progress.
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
    why_padded, lines.rounding = notes
    lines.passes = "packed" if why_padded is None else f"padded. {why_padded}"

    def on_progress(what: str, *counts: int) -> None:
        # The user may have removed the callback since construction.
        if lines in handler.callbacks:
            lines.on_rollout(what, *counts)

    for what, engine in engines.items():
        engine.on_progress = partial(on_progress, what)


def shield_integrations(callbacks: Sequence[TrainerCallback]) -> None:
    """Hide None and non-finite values from upstream's integrations; `log_history` has all values.

    A metric without an episode in the batch is None in the log, and TensorBoard and MLflow warn of it each
    time. NaN and infinities are not points of a curve.
    """
    for callback in callbacks:
        if type(callback).__module__.startswith("transformers.integrations"):
            callback.on_log = partial(_log_points, callback.on_log)


def _log_points(
    on_log: Callable[..., object],
    *args: object,
    logs: Mapping[str, object] | None = None,
    **kwargs: object,
) -> object:
    """Call an integration's `on_log` with the values of `logs` that are finite numbers or text."""
    points = {}
    for name, value in (logs or {}).items():
        if value is not None and not (isinstance(value, float) and not math.isfinite(value)):
            points[name] = value
    return on_log(*args, logs=points, **kwargs)
