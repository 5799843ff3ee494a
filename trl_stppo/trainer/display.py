"""What a person sees while training runs: lines of figures, sample episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK

from ..watch.lines import ProgressLines
from ..watch.metrics_file import MetricsFile
from .describe import describe
from .evaluation_settings import evaluation_settings, undisturbed
from .memory import announce
from .reporting import shield_integrations

if TYPE_CHECKING:
    from .ppo_trainer import PPOTrainer


class MemoryCallback(TrainerCallback):
    """Says at the start what the run will take of the card."""

    def __init__(self, trainer: PPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print the estimate, and hints where it is more than there is."""
        announce(self._trainer)


def install_callbacks(trainer: PPOTrainer) -> None:
    """Put lines in place of upstream's display, announce the memory, write down what is logged."""
    shield_integrations(trainer.callback_handler.callbacks)
    trainer.add_callback(MetricsFile(lambda: describe(trainer).task))
    trainer.add_callback(MemoryCallback(trainer))
    print_lines(trainer)


def print_lines(trainer: PPOTrainer) -> None:
    """Have lines printed, and neither a progress bar nor dictionaries beside them."""
    # The third is another one in a notebook: a table.
    upstreams = ProgressCallback, PrinterCallback, DEFAULT_PROGRESS_CALLBACK
    callbacks = list(trainer.callback_handler.callbacks)
    for callback in callbacks:
        if isinstance(callback, upstreams):
            trainer.remove_callback(callback)
    lines = next((c for c in callbacks if isinstance(c, ProgressLines)), None)
    if lines is None:
        trainer.add_callback(lines := ProgressLines())
    lines.task = lambda: describe(trainer).task


def print_episodes(trainer: PPOTrainer, *, first_batch_only: bool) -> None:
    """Play episodes of the evaluation (or training) data and print prompt, completion and score."""
    from rich.console import Console
    from rich.table import Table

    table = Table("prompt", "completion", "score", title=f"step {trainer.state.global_step}")
    with undisturbed(trainer, trainer._upstream), evaluation_settings(trainer):
        rows = trainer.eval_dataset
        first = next(iter(rows)) if isinstance(rows, dict) else None
        held_out = rows is not None
        loader = trainer.get_eval_dataloader(first) if held_out else trainer.get_train_dataloader()
        trainer.model.eval()
        for inputs in loader:
            rollout = trainer._evaluator.play(inputs)
            for episode, score in zip(rollout.episodes, rollout.returns, strict=True):
                texts = trainer._tokenizer.batch_decode(
                    [episode.prompt_ids, episode.ids], skip_special_tokens=True
                )
                table.add_row(*texts, f"{score:.3g}")
            if first_batch_only:
                break
    if trainer.accelerator.is_main_process:
        Console().print(table)
