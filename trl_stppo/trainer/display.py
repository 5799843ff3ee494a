"""Display of a running training: lines of metrics, sample episodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from ..rollout.engine import RolloutEngine
from ..watch.lines import ProgressLines
from ..watch.metrics_file import MetricsFile
from .bridge import Bridge
from .describe import task
from .loop.rollout import Rollout
from .planning.plan import RolloutPlan


def install_callbacks(
    host: Bridge, rollout: RolloutPlan, why_padded: str | None, engines: Iterable[RolloutEngine]
) -> None:
    """Write the log to a file, and replace upstream's bar and printed dictionaries by lines of metrics.

    `why_padded`: why forward passes are not packed, or None; `engines` report their progress.
    """
    policy = host.accelerator.unwrap_model(host.model)
    names = partial(task, policy, host.train_dataset, rollout)
    shield_integrations(host.callback_handler.callbacks)
    host.add_callback(MetricsFile(names))
    # In a notebook the default callback is a third class, which shows a table.
    upstreams = ProgressCallback, PrinterCallback, DEFAULT_PROGRESS_CALLBACK
    callbacks = list(host.callback_handler.callbacks)
    for callback in callbacks:
        if isinstance(callback, upstreams):
            host.remove_callback(callback)
    lines = next((c for c in callbacks if isinstance(c, ProgressLines)), None)
    if lines is None:
        host.add_callback(lines := ProgressLines())
    lines.task = names
    lines.passes = "packed" if why_padded is None else f"padded. {why_padded}"

    def on_progress(ended: int, episodes: int) -> None:
        # The user may have removed the callback since construction.
        if lines in host.callback_handler.callbacks:
            lines.on_rollout(ended, episodes)

    for engine in engines if host.accelerator.is_main_process else ():
        engine.on_progress = on_progress


def print_episodes(host: Bridge, play: Callable[[Any], Rollout], *, first_batch_only: bool) -> None:
    """Play episodes of the evaluation (or training) data and print prompt, completion and score."""
    from rich.console import Console
    from rich.table import Table

    table = Table("prompt", "completion", "score", title=f"step {host.state.global_step}")
    rows, decode = host.eval_dataset, host.text_tokenizer.batch_decode
    first = next(iter(rows)) if isinstance(rows, dict) else None
    held_out = rows is not None
    loader = host.get_eval_dataloader(first) if held_out else host.get_train_dataloader()
    host.model.eval()
    for inputs in loader:
        rollout = play(inputs)
        for episode, score in zip(rollout.episodes, rollout.totals, strict=True):
            texts = decode([episode.prompt_ids, episode.ids], skip_special_tokens=True)
            table.add_row(*texts, f"{score:.3g}")
        if first_batch_only:
            break
    if host.accelerator.is_main_process:
        Console().print(table)


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
