"""What a person sees while training runs: the progress bar's postfix, sample episodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers import ProgressCallback, TrainerCallback

from ..watch.metrics_file import MetricsFile
from .describe import describe
from .evaluation_settings import evaluation_settings, undisturbed
from .memory import announce
from .reporting import shield_integrations

if TYPE_CHECKING:
    from .ppo_trainer import PPOTrainer

# Shown behind the progress bar, where known: label -> metric.
POSTFIX = {
    "success": "episode/success_rate",
    "score": "episode/score",
    "clip": "policy/clip_fraction",
    "kl": "policy/approx_kl",
    "‖C‖": "clip_bias/norm",
    "s": "clip_bias/scale",
}


class PostfixProgressCallback(ProgressCallback):
    """The usual progress bar, with the figures one watches behind it."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the newest figures, then print the log as usual."""
        if state.is_world_process_zero and self.training_bar is not None and logs:
            shown = {k: f"{logs[m]:.3g}" for k, m in POSTFIX.items() if logs.get(m) is not None}
            if shown:
                self.training_bar.set_postfix(shown, refresh=False)
        super().on_log(args, state, control, logs=logs, **kwargs)


class SampleEpisodesCallback(TrainerCallback):
    """Prints sample episodes `num_sample_generations` times in the course of the training."""

    def __init__(self, trainer: PPOTrainer, times: int) -> None:
        self._trainer, self._times = trainer, times

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print when the next of the evenly spaced steps has been reached."""
        every = max(1, state.max_steps // self._times)
        if state.global_step % every == 0:
            self._trainer.generate_completions(sampling=True)


class MemoryCallback(TrainerCallback):
    """Says at the start what the run will take of the card."""

    def __init__(self, trainer: PPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print the estimate, and hints where it is more than there is."""
        announce(self._trainer)


def install_callbacks(trainer: PPOTrainer) -> None:
    """Swap in our progress bar or live view, announce the memory, write down what is logged."""
    shield_integrations(trainer.callback_handler.callbacks)
    trainer.add_callback(MetricsFile(lambda: describe(trainer).task))
    trainer.add_callback(MemoryCallback(trainer))
    install_live_view(trainer)
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(PostfixProgressCallback)
    if trainer.args.num_sample_generations > 0:
        times = trainer.args.num_sample_generations
        trainer.add_callback(SampleEpisodesCallback(trainer, times))


def install_live_view(trainer: PPOTrainer) -> None:
    """Add the live view where it is asked for, and show whichever there is what only we know."""
    from ..watch.live import LiveView, replace_progress_bar

    if trainer.args.live_view and not live_views(trainer):
        trainer.add_callback(LiveView())
    for view in live_views(trainer):
        replace_progress_bar(trainer)
        view.newest_episode = lambda: newest_episode(trainer)
        view.stop_requested = lambda: trainer.stop_signal is not None


def live_views(trainer: PPOTrainer) -> list[Any]:
    """The live views among the callbacks."""
    from ..watch.live import LiveView

    return [c for c in trainer.callback_handler.callbacks if isinstance(c, LiveView)]


@contextmanager
def restored_terminal(trainer: PPOTrainer) -> Iterator[None]:
    """Around a training: however it ends, nothing keeps drawing on the terminal."""
    try:
        yield
    finally:
        for view in live_views(trainer):
            view.close()


def newest_episode(trainer: PPOTrainer) -> str | None:
    """What the live view shows of the last episode: its score, how it ended, what was said."""
    said = trainer._logs["completion"]
    if not said:
        return None
    newest = said[-1]
    if not isinstance(newest, str):
        newest = "  ".join(f"{message['role']}: {message.get('content')}" for message in newest)
    ends = trainer._logs["extra"].get("stop_reason")
    facts = [f"score {trainer.last_scores[-1]:.3g}"] if trainer.last_scores else []
    facts += [str(ends[-1])] if ends else []
    return f"({', '.join(facts)}) {newest}" if facts else newest


def print_episodes(trainer: PPOTrainer, *, first_batch_only: bool) -> None:
    """Play episodes of the evaluation (or training) data and print prompt, completion and score."""
    from rich.console import Console
    from rich.table import Table

    table = Table("prompt", "completion", "score", title=f"step {trainer.state.global_step}")
    with undisturbed(trainer), evaluation_settings(trainer):
        rows = trainer.eval_dataset
        first = next(iter(rows)) if isinstance(rows, dict) else None
        held_out = rows is not None
        loader = trainer.get_eval_dataloader(first) if held_out else trainer.get_train_dataloader()
        trainer.model.eval()
        for inputs in loader:
            batch = trainer._prepare_inputs(inputs)
            prompts = trainer._tokenizer.batch_decode(batch["prompt_ids"], skip_special_tokens=True)
            texts = trainer._tokenizer.batch_decode(
                batch["completion_ids"], skip_special_tokens=True
            )
            for prompt, text, score in zip(prompts, texts, trainer.last_scores, strict=True):
                table.add_row(prompt, text, f"{score:.3g}")
            if first_batch_only:
                break
    if trainer.accelerator.is_main_process:
        Console().print(table)
