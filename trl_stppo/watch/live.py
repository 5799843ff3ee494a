"""What one sees of a run while it trains: a live panel in a terminal, one line per round elsewhere."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from .figures import SUCCESS, Figures, Progress, duration, shown
from .panel import LIMITS, LivePanel
from .terminal import LiveTerminal, can_be_live

HEADING = "  step        success  valid   clip      KL     ‖C‖  scale   tok/s   left"
# Says which trainer's warnings the panel repeats.
LOGGER = "trl_stppo"


class Watcher(TrainerCallback):
    """Collects what is logged and when steps begin and end; what to do with it is for subclasses."""

    def __init__(self) -> None:
        self.figures, self.progress = Figures(), Progress()
        self._training = False
        self._lines_printed = 0  # rounds that have their line

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start afresh; a resumed run brings what it had logged."""
        epochs, parts = (
            getattr(args, f"num_{x}", None) or 1 for x in ("iterations", "mini_batches")
        )
        steps = epochs * parts
        self.figures = Figures()
        self.progress = Progress(steps, getattr(args, "generation_batch_size", 0) or 0)
        for entry in state.log_history:
            self.figures.add(entry)
        self.figures.averaged()  # belongs to rounds that were shown before
        self.progress.start(state.global_step, state.max_steps)
        self._training, self._lines_printed = True, state.global_step // steps

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Upstream's event."""
        self.progress.begin_step()

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Upstream's event: a micro-batch is over, so the episodes have been played."""
        self.progress.enter("updating")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Upstream's event."""
        self.progress.end_step(state.global_step)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Upstream's event."""
        self.progress.enter("evaluating")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Upstream's event."""
        self.progress.enter("updating" if self._training else "done")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Take in the newest entry, as it is in the history: callbacks before may drop some of it."""
        entry = state.log_history[-1] if state.log_history else dict(logs or {})
        self.figures.add(entry)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Upstream's event."""
        self.progress.enter("done")
        self._training = False

    def due(self, state: Any) -> bool:
        """Whether this log completes a round that has no line yet."""
        rounds = state.global_step // self.progress.steps_per_round
        new = self._training and state.is_world_process_zero and rounds > self._lines_printed
        if new:
            self._lines_printed = rounds
        return new

    def line(self) -> str:
        """What has been logged since the last line, as means."""
        get, progress = self.figures.averaged(), self.progress
        return (
            f"{progress.step:5d}/{progress.max_steps:<5d}  {shown(get(SUCCESS)):>7}"
            f"  {shown(get('turns/valid_action_rate'), '.2f'):>5}"
            f"  {shown(get('policy/clip_fraction')):>5}  {shown(get('policy/approx_kl'), '.4f'):>6}"
            f"  {shown(get('clip_bias/norm')):>6}  {shown(get('clip_bias/scale'), '.2f'):>5}"
            f"  {shown(get('perf/update_tokens_per_second'), '.0f'):>6}  {duration(progress.left()):>5}"
        )


class ProgressLines(Watcher):
    """One line per rollout batch: success, valid actions, clipping, KL, ‖C‖, speed, time left.

    Takes the place of the progress bar and of the printed dictionaries; where the trainer has a
    `LiveView`, that one prints instead.

    Args:
        trainer: to add itself to.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._console = Console(highlight=False)
        replace_progress_bar(trainer)
        callbacks = trainer.callback_handler.callbacks
        self._view = next((c for c in callbacks if isinstance(c, LiveView)), None)
        if self._view is None:
            trainer.add_callback(self)

    def start(self, before: Mapping[str, float]) -> None:
        """Print where the agent stands, and the heading.

        Args:
            before: what an evaluation has given, nothing without.
        """
        if f"eval_{SUCCESS}" in before:
            held_out = before[f"eval_{SUCCESS}"]
            self._console.print(f"held-out success before training: {held_out:.3f}")
        if self._view is None:
            self._console.print(HEADING)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print once a rollout batch has been trained on."""
        super().on_log(args, state, control, logs, **kwargs)
        if self.due(state):
            self._console.print(self.line())


class LiveView(Watcher):
    """A panel of the figures one watches, redrawn in the terminal while the run prints above it.

    Where stdout is no terminal, or several processes share it, it prints one line per rollout batch
    instead. `live_view=True` adds it to a trainer of this package; any other takes it among its
    `callbacks`.

    Args:
        newest_episode: gives the newest episode as text, None before there is one; trainers of this
            package bring their own.
    """

    def __init__(self, newest_episode: Callable[[], str | None] | None = None) -> None:
        super().__init__()
        self.newest_episode = newest_episode
        # Tells that a signal asks for a stop, whose handler has then written to the terminal.
        self.stop_requested: Callable[[], bool] = lambda: False
        self._terminal: LiveTerminal | None = None
        self._lines = Console(highlight=False)
        self._warnings: _Warnings | None = None

    @property
    def live(self) -> bool:
        """Whether the panel is being drawn now."""
        return self._terminal is not None and self._terminal.running

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw, or print the heading."""
        super().on_train_begin(args, state, control, **kwargs)
        self.close()
        if not state.is_world_process_zero:
            return
        if getattr(args, "world_size", 1) > 1 or not can_be_live():
            self._lines.print(HEADING)
            return
        limits = {field: getattr(args, field, None) for field in LIMITS}
        self._panel = LivePanel(self.figures, self.progress, limits)
        self._panel.title = " ".join(
            str(part) for part in (getattr(args, "variant", None), args.output_dir) if part
        )
        self._warnings = _Warnings(self._panel)
        logging.getLogger(LOGGER).addHandler(self._warnings)
        self._terminal = LiveTerminal(self._panel, lambda: self.stop_requested())
        self._terminal.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Leave the terminal as it was; also for a training that ends with an exception."""
        if self._terminal is None:
            return
        terminal, self._terminal = self._terminal, None
        atexit.unregister(self.close)
        terminal.stop()
        logging.getLogger(LOGGER).removeHandler(self._warnings or logging.NullHandler())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the newest episode."""
        super().on_step_end(args, state, control, **kwargs)
        if self._terminal is not None and self.newest_episode is not None:
            self._panel.episode = self.newest_episode()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the newest figures."""
        super().on_log(args, state, control, logs, **kwargs)
        if self._terminal is not None:
            self._terminal.refresh()
        elif self.due(state):
            self._lines.print(self.line())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the last panel on the screen."""
        super().on_train_end(args, state, control, **kwargs)
        self.close()


class _Warnings(logging.Handler):
    """Keeps the newest warning for the panel; it is printed as it would be without."""

    def __init__(self, panel: LivePanel) -> None:
        super().__init__(logging.WARNING)
        self._panel = panel

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it, and hand it on where nobody else is there to print it."""
        self._panel.warning = record.getMessage()
        others = [*logging.getLogger(LOGGER).handlers, *logging.getLogger().handlers]
        if logging.lastResort is not None and others == [self]:
            logging.lastResort.handle(record)


def replace_progress_bar(trainer: Any) -> None:
    """Take out upstream's progress bar and its printing of every log."""
    for callback in list(trainer.callback_handler.callbacks):
        if isinstance(callback, ProgressCallback | PrinterCallback):
            trainer.remove_callback(callback)
