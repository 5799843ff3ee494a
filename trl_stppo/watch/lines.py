"""Progress lines in the terminal: an introduction, one line per rollout batch and per evaluation.

A *round* is one rollout batch with its updates. Its line comes with the log entry that completes it, so
`logging_steps` sets how often lines appear. Only the main process prints. An error here does not end a run.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from transformers import TrainerCallback, TrainerState, TrainingArguments

from .runs import SCORE, SUCCESS, Entry, duration, number, shown

logger = logging.getLogger(__name__)
FIRST = 3
# Print an optimizer step of an update if no line was printed for this many seconds.
QUIET_SECONDS = 20.0
EVALUATED = (
    *(("success", SUCCESS, ".3f"), ("score", SCORE, ".3g"), ("turns", "turns/mean", ".2f")),
    ("valid", "turns/valid_action_rate", ".2f"),
)
CUT_OFF = {
    "stop_reason/token_budget": "max_completion_length too small, or turns that do not end?",
    "stop_reason/max_turn_tokens": "max_turn_tokens too small, or turns that do not end?",
    "stop_reason/max_turns": "max_turns too small?",
}
EQUAL = "all episodes of a rollout got the same reward, so nothing could be learned"
# A mean value is too large beyond this many times the largest sum of rewards. The factor is above 1, because
# returns contain values.
FAR = 1.2
# Metric that is 0 in all rollouts if nothing can be learned -> the message about it.
NEEDED = {SUCCESS: "no episode succeeded", "advantage/std": EQUAL, "reward_std": EQUAL}
GUARDS = {
    "guard/skipped_steps": "skipped, not finite",
    "guard/empty_steps": "skipped, no episode to learn from",
}


class Column(NamedTuple):
    """A column of the progress lines: label, metric, number format, width with spaces."""

    label: str
    metric: str
    form: str
    width: int


# Columns from left to right. With rollout number and times, a line has 80 characters. The score replaces an
# unknown success. It replaces the entropy if the first rollout's success is 0.
COLUMNS = (
    Column("success", SUCCESS, ".3f", 9),
    Column("score", SCORE, ".3g", 9),
    Column("turns", "turns/mean", ".2f", 7),
    Column("entropy", "policy/entropy", ".3f", 9),
    Column("clip", "policy/clip_fraction", ".3f", 7),
    Column("KL", "policy/approx_kl", ".2g", 9),
    Column("scale", "clip_bias/scale", ".2f", 6),
)


class ProgressLines(TrainerCallback):
    """Callback that prints the progress of a training, as lines for a terminal, a file or a pipe.

    It replaces transformers' progress bar and printed dictionaries;
    `trainer.remove_callback(ProgressLines)` removes it. `task` returns the known names of `model`,
    `environment` and `dataset` when a training begins.
    """

    def __init__(self, task: Callable[[], Mapping[str, str]] = dict) -> None:
        self.task = task
        self.passes = ""
        self.rounding: str | None = None
        self._steps = 1
        # Numbers of rollouts and of log entries that have a line.
        self._lines = self._logged = 0
        self._training, self._first = False, 0
        self._began = self._evaluating = self._at_line = self._spoke = 0.0
        self._columns: list[Column] = []
        # Metrics that at least one entry of the log has.
        self._metrics: set[str] = set()
        self._warned = self._shows_both = self._far = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: object, **kwargs: object
    ) -> None:
        """Print model, data and length of the training."""
        self._steps, self._first = getattr(args, "steps_per_rollout", 1), state.global_step
        self._lines, self._training = state.global_step // self._steps, True
        self._logged, self._columns = len(state.log_history), []
        self._metrics = metrics_in(state.log_history)
        self._began = self._spoke = time.monotonic()
        self._evaluating = self._at_line = 0.0
        if state.is_world_process_zero:
            for line in self._introduction(args, state):
                self._say(line)

    def on_rollout(self, what: str, ended: int, episodes: int, turns: int) -> None:
        """Print how far a long rollout batch or evaluation is; `what` is its name."""
        self._say(f"  {what}: {ended} of {episodes} episodes have ended, after {turns} turns")

    def on_step_end(self, _: object, state: TrainerState, *__: object, **kwargs: object) -> None:
        """Print the optimizer steps of a long update."""
        step = state.global_step % self._steps
        if step and state.is_world_process_zero and time.monotonic() - self._spoke > QUIET_SECONDS:
            self._say(f"  update: {step} of {self._steps} optimizer steps")

    def on_log(self, _: object, state: TrainerState, *__: object, **kwargs: object) -> None:
        """Print a line after a finished rollout batch, with the mean metrics since the last line."""
        log, new = state.log_history, state.log_history[self._logged :]
        rounds, main = self._rounds(state), state.is_world_process_zero
        # Print only training metrics, because evaluations and the end of the run are logged too.
        if self._training and main and rounds > self._lines and metrics_in(new):
            self._print_line(state, rounds)
            self._lines, self._logged = rounds, len(log)
            if known(log, "advantage/std") == [0.0] * FIRST:
                say_fruitless(log)

    def on_evaluate(
        self,
        _: object,
        state: TrainerState,
        *__: object,
        metrics: Entry | None = None,
        **kwargs: object,
    ) -> None:
        """Print the metrics of an evaluation, also after a direct call of `trainer.evaluate()`."""
        metrics = metrics or {}
        prefix = next((n.removesuffix("runtime") for n in metrics if n.endswith("_runtime")), None)
        if prefix is None:
            return
        self._evaluating += metrics[f"{prefix}runtime"]
        if state.is_world_process_zero:
            name = prefix.removeprefix("eval").strip("_")
            title = f"evaluation of {name}" if name else "evaluation"
            if self._training and not state.global_step:
                title += " before training"
            elif self._training:
                title += f" after rollout {self._rounds(state)}/{self._total(state)}"
            self._say(f"{title}: {evaluation_figures(metrics, prefix)}")

    def on_train_end(self, _: object, state: TrainerState, *__: object, **kwargs: object) -> None:
        """Print the numbers of finished rollouts and optimizer steps, and the elapsed time."""
        self._training = False
        if not state.is_world_process_zero:
            return
        verb = "done" if state.global_step >= state.max_steps else "stopped"
        spent = f", {duration(self._evaluating)} of it evaluations" if self._evaluating else ""
        self._say(
            f"{verb} after rollout {self._rounds(state)}/{self._total(state)}, step "
            f"{state.global_step}/{state.max_steps}, in {duration(time.monotonic() - self._began)}{spent}"
        )
        say_fruitless(state.log_history)

    def _say(self, line: str) -> None:
        """Print a line, and note the time."""
        self._spoke = time.monotonic()
        say(line)

    def _rounds(self, state: TrainerState) -> int:
        """Return the number of finished rounds (rollout batches). The last round may be shorter."""
        over = state.global_step >= state.max_steps
        return self._total(state) if over else state.global_step // self._steps

    def _total(self, state: TrainerState) -> int:
        return math.ceil(state.max_steps / self._steps)

    def _introduction(self, args: TrainingArguments, state: TrainerState) -> Iterable[str]:
        task, steps = self.task(), self._steps
        method = getattr(args, "variant", None) or type(args).__name__.removesuffix("Config")
        words = [f"{method} trains {task.get('model', 'the model')}"]
        if task.get("environment", "none") != "none":
            words.append(f"in {task['environment']}")
        words += [f"on {task['dataset']}"] if "dataset" in task else []
        yield f"{' '.join(words)}; into {args.output_dir}"
        rollouts = self._total(state)
        episodes = getattr(args, "generation_batch_size", None)
        of = f" of {episodes:,} episodes, {rollouts * episodes:,} in all" if episodes else ""
        updates = f"{steps} optimizer step{'s' * (steps > 1)} each, {state.max_steps:,} in all"
        yield f"{rollouts:,} rollout{'s' * (rollouts > 1)}{of}; {updates}"
        kind = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
        # The trust region shortens the first steps, too.
        most = "up to " if "trust_region" in (getattr(args, "stabilizers", None) or ()) else ""
        rates = f"learning rate: {most}{args.learning_rate:g}"
        if (rate := getattr(args, "critic_learning_rate", None)) is not None:
            rates = f"learning rates: policy {most}{args.learning_rate:g}, critic {rate:g}"
        to_zero = " to 0" if kind in ("linear", "cosine") else ""
        terms = {name: getattr(args, name, None) for name in ("kl_coef", "beta")}
        kls = "".join(f"; {name} {value:g}" for name, value in terms.items() if value)
        yield f"{rates}; {kind}{to_zero}{kls}"
        if self.passes:
            yield f"forward passes: {self.passes}"
        if self.rounding:
            yield f"! rounding: {self.rounding}"
        if state.global_step:
            yield f"resumed after rollout {self._rounds(state)}/{rollouts}, step {state.global_step}"

    def _print_line(self, state: TrainerState, rounds: int) -> None:
        total = str(self._total(state))
        place = f"rollout {rounds:>{len(total)}}/{total}"
        log, new = state.log_history, state.log_history[self._logged :]
        self._metrics |= metrics_in(new)
        if not self._columns:
            # While success is 0 the score may rise, so show both.
            self._shows_both = known(log, SUCCESS)[:1] == [0.0] and SCORE in self._metrics
        left_out = "score" if SUCCESS in self._metrics else "success"
        left_out = "entropy" if self._shows_both else left_out
        columns = [c for c in COLUMNS if c.metric in self._metrics and c.label != left_out]
        if columns != self._columns:
            if not self._columns:
                self._say("docs/watching.md explains the columns")
            labels = "".join(f"{column.label:>{column.width}}" for column in columns)
            self._say(f"{'':{len(place)}}{labels}{'time':>8}{'left':>8}")
            self._columns = columns
        trained = time.monotonic() - self._began - self._evaluating
        seconds, self._at_line = trained - self._at_line, trained
        left = trained * (state.max_steps - state.global_step) / (state.global_step - self._first)
        cells = [f"{shown(mean(known(new, c.metric)), c.form):>{c.width}}" for c in columns]
        times = f"{duration(seconds / (rounds - self._lines)):>8}{duration(left):>8}"
        self._say("".join([place, *cells, times]))
        value, most = (mean(known(new, f"value/{name}")) for name in ("mean", "reward_max_abs"))
        if value is not None and most is not None and abs(value) > FAR * most and not self._far:
            self._far = True
            self._say(
                f"! the critic's values, {value:.3g} in the mean, are beyond all rewards (up to {most:.3g}): "
                "lower critic_learning_rate"
            )
        for metric, causes in CUT_OFF.items():
            cut, solved = mean(known(new, metric)), mean(known(new, SUCCESS))
            # If the success is not known, warn only if nearly all episodes are cut.
            many = 0.95 if solved is None else 0.25
            if not self._warned and cut is not None and cut > many and not solved:
                self._warned = True
                ends = f"{cut:.0%} of the episodes end by {metric[12:]}"
                self._say(f"! {ends}{'' if solved is None else ' and none is solved'}: {causes}")
        for metric, what in GUARDS.items():
            # The metric is a running total.
            before = max(known(log[: self._logged], metric), default=0.0)
            if (more := round(max(known(new, metric), default=0.0) - before)) > 0:
                self._say(f"! {more} optimizer step{'s' if more > 1 else ''} {what}")


def say_fruitless(history: list[Entry]) -> None:
    """Print and log that no rollout had a learning signal, and which metrics to read first."""
    zero = [name for name in NEEDED if (values := known(history, name)) and not any(values)]
    if said := " and ".join(dict.fromkeys(NEEDED[name] for name in zero)):
        valid = "turns/valid_action_rate and " if known(history, "turns/valid_action_rate") else ""
        text = f"{said}: look first at {valid}stop_reason/*"
        say(f"! {text}; see docs/reliability.md")
        logger.info(text)


def known(history: list[Entry], name: str) -> list[float]:
    """Return the values of a metric in a log, oldest first."""
    return [value for entry in history if (value := number(entry.get(name))) is not None]


def metrics_in(entries: list[Entry]) -> set[str]:
    """Return the metrics of columns that have a number in any of these entries of a log."""
    return {column.metric for column in COLUMNS if known(entries, column.metric)}


def evaluation_figures(metrics: Entry, prefix: str) -> str:
    """Format an evaluation's logged metrics: success with its interval, score, turns, valid actions."""
    words = []
    for label, metric, form in EVALUATED:
        value = number(metrics.get(prefix + metric))
        if value is None:
            continue
        words.append(f"{label} {shown(value, form)}")
        low, high = (number(metrics.get(f"{prefix}{SUCCESS}_{end}")) for end in ("low", "high"))
        if metric == SUCCESS and low is not None and high is not None:
            words[-1] += f" ({low:.3f} to {high:.3f})"
    episodes = number(metrics.get(f"{prefix}episodes"))
    words += [f"{episodes:.0f} episodes"] if episodes is not None else []
    return ", ".join([*words, duration(number(metrics.get(f"{prefix}runtime")))])


def mean(values: list[float]) -> float | None:
    """Return the mean of the values, or None if there are no values."""
    return sum(values) / len(values) if values else None


def say(line: str) -> None:
    """Print a line and flush. An output error is logged and does not end the training."""
    try:
        # A name may have characters that the terminal lacks.
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print(line.encode(encoding, "replace").decode(encoding), flush=True)
    except (OSError, ValueError):
        # Terminal, reader or stdout is closed.
        logger.debug("Cannot be printed: %s", line, exc_info=True)
