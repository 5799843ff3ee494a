"""Display of a running training: lines of metrics, sample episodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PrinterCallback, ProgressCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from ...watch.lines import ProgressLines
from ...watch.metrics_file import MetricsFile
from ..bridge import Bridge
from ..describe import describe
from ..loop.rollout import Rollout
from ..planning.plan import RolloutPlan
from .reporting import shield_integrations


def install_callbacks(host: Bridge, rollout: RolloutPlan) -> None:
    """Replace upstream's display by lines, and write the log to a file."""

    def task() -> dict[str, str]:
        return describe(host, rollout).task

    shield_integrations(host.callback_handler.callbacks)
    host.add_callback(MetricsFile(task))
    _print_lines(host, task)


def _print_lines(host: Bridge, task: Callable[[], dict[str, str]]) -> None:
    """Print lines, without a progress bar or dictionaries."""
    # In a notebook the third is a table.
    upstreams = ProgressCallback, PrinterCallback, DEFAULT_PROGRESS_CALLBACK
    callbacks = list(host.callback_handler.callbacks)
    for callback in callbacks:
        if isinstance(callback, upstreams):
            host.remove_callback(callback)
    lines = next((c for c in callbacks if isinstance(c, ProgressLines)), None)
    if lines is None:
        host.add_callback(lines := ProgressLines())
    lines.task = task


def print_episodes(host: Bridge, play: Callable[[Any], Rollout], *, first_batch_only: bool) -> None:
    """Play episodes of the evaluation (or training) data and print prompt, completion and score."""
    from rich.console import Console
    from rich.table import Table

    table = Table("prompt", "completion", "score", title=f"step {host.state.global_step}")
    rows, decode = host.eval_dataset, host.internals.tokenizer.batch_decode
    first = next(iter(rows)) if isinstance(rows, dict) else None
    held_out = rows is not None
    loader = host.get_eval_dataloader(first) if held_out else host.get_train_dataloader()
    host.model.eval()
    for inputs in loader:
        rollout = play(inputs)
        for episode, score in zip(rollout.episodes, rollout.earnings, strict=True):
            texts = decode([episode.prompt_ids, episode.ids], skip_special_tokens=True)
            table.add_row(*texts, f"{score:.3g}")
        if first_batch_only:
            break
    if host.accelerator.is_main_process:
        Console().print(table)
