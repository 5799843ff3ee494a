"""What a run prints while it trains: what it is, one line per rollout batch, one per evaluation.

A *round* is one rollout batch with its updates. Its line comes with the log that completes it, so
`logging_steps` says how often. Only the main process prints, and nothing here can end a training.
"""

from __future__ import annotations

import logging
import math
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from transformers import TrainerCallback

from ..redaction import redacted
from .figures import SCORE, SUCCESS, duration, number, shown

logger = logging.getLogger(__name__)


class Column(NamedTuple):
    """One figure of a line.

    Attributes:
        label: above it.
        metric: name in the log.
        form: how it is formatted.
        width: of the column, with the spaces before it.
        meaning: for the legend.
    """

    label: str
    metric: str
    form: str
    width: int
    meaning: str


# From left to right.
COLUMNS = (
    Column("success", SUCCESS, ".3f", 9, "share of episodes solved"),
    Column("score", SCORE, ".3g", 9, "reward of an episode"),
    Column("turns", "turns/mean", ".2f", 7, "per episode"),
    Column("valid", "turns/valid_action_rate", ".2f", 7, "actions the environment could read"),
    Column("entropy", "policy/entropy", ".3f", 9, "nats per token"),
    Column("clip", "policy/clip_fraction", ".3f", 7, "share of tokens clipped"),
    Column("KL", "policy/approx_kl", ".4f", 8, "change since sampling, nats"),
    Column("‖C‖", "clip_bias/norm", ".3g", 9, "size of the clipping bias"),
    Column("scale", "clip_bias/scale", ".2f", 7, "factor on the step, 1 = not corrected"),
    Column("tokens/s", "perf/update_tokens_per_second", ",.0f", 10, "trained"),
    # With vLLM alone.
)
# What a narrow terminal gets first; the score stands in for success that nobody judges.
IMPORTANCE = (
    *("success", "valid", "clip", "KL", "scale", "‖C‖"),
    *("turns", "score", "entropy", "tokens/s"),
)
# Running totals of guards -> what to say when one has grown.
GUARDS = {
    "guard/skipped_steps": "skipped, not finite",
    "guard/empty_steps": "skipped, no episode to learn from",
    "guard/kl_stopped_steps": "left out beyond target_kl",
}
# Metric -> the range, over the rollouts of a line, that says of the task that little can be learnt, and
# what to say; once per run.
HINTS = {
    "stop_reason/token_budget": (
        (0.5, 1.0),
        "half of the episodes or more are cut off: raise max_completion_length, or lower max_turn_tokens",
    ),
    "stop_reason/max_turns": (
        (0.9, 1.0),
        "nine episodes in ten or more run out of turns: raise max_turns, or begin with easier rows",
    ),
    "reward_std": ((0.0, 0.0), "all episodes score {score}: nothing tells good ones from bad ones"),
}
_TIMES = 16  # characters of time and time left


class Pace:
    """How long rounds and evaluations take, and what that makes of the rest of a run.

    Args:
        clock: seconds from any fixed moment.

    Attributes:
        evaluating: seconds that evaluations have taken since the start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.start(0)

    def start(self, step: int) -> None:
        """Begin; a resumed run has steps behind it that took none of this process's time."""
        self._began = self._clock()
        self._first = self._last = step
        self._at_last = self._trained = 0.0
        self.evaluating, self._evaluations = 0.0, 0

    @property
    def gone(self) -> float:
        """Seconds since the start, evaluations among them."""
        return self._clock() - self._began

    def end_round(self, step: int) -> None:
        """A round is over after so many optimizer steps."""
        self._last, self._trained = step, self.gone - self.evaluating

    def since_line(self) -> float:
        """Seconds of the rounds that have ended since the last call, without evaluations."""
        seconds, self._at_last = self._trained - self._at_last, self._trained
        return seconds

    def evaluated(self, seconds: float, *, another: bool) -> None:
        """An evaluation is over; `another` is False for a further data set at the same step."""
        self.evaluating += seconds
        self._evaluations += another

    def left(self, max_steps: int, evaluations: int) -> float | None:
        """Seconds until the end if all goes on taking as long; None before the first round is over.

        Args:
            max_steps: of the whole run.
            evaluations: that are still to come; they count from the first one that was seen.
        """
        if self._last <= self._first:
            return None
        to_come = (max_steps - self._last) * self._trained / (self._last - self._first)
        to_come -= self.gone - self.evaluating - self._trained  # of that, gone since the round
        return max(0.0, to_come) + evaluations * self.evaluating / max(1, self._evaluations)


class ProgressLines(TrainerCallback):
    """Prints how a training goes, as lines that a terminal, a file and a pipe show alike.

    Trainers of this package have it in place of transformers' progress bar and printed dictionaries;
    `trainer.remove_callback(ProgressLines)` takes it out.

    Args:
        task: gives the names of `model`, `environment` and `dataset` when a training begins, as far as
            they are known.
    """

    def __init__(self, task: Callable[[], Mapping[str, str]] = dict) -> None:
        self.task, self._pace = task, Pace()
        self._steps = 1  # of a round
        self._lines = 0  # rounds that have their line
        self._training, self._first, self._evaluated_at = False, 0, -1
        self._legend: list[Column] = []
        self._since: dict[str, list[float]] = {}
        self._guards: dict[str, float] = {}
        self._hinted: set[str] = set()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say what is trained, on what, and how long."""
        self._steps = steps_per_round(args)
        self._lines, self._training = state.global_step // self._steps, True
        self._first, self._evaluated_at = state.global_step, -1
        self._legend, self._since = [], {}
        for entry in state.log_history:  # a resumed run goes on with its columns and counts
            self._take(entry)
        self._guards = {metric: max(self._since.get(metric, [0.0])) for metric in GUARDS}
        self._known, self._since = set(self._since), {}
        self._pace.start(state.global_step)
        if state.is_world_process_zero:
            for line in self._introduction(args, state):
                say(redacted(line))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the time of a round."""
        if state.global_step % self._steps == 0 or state.global_step >= state.max_steps:
            self._pace.end_round(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print a line once a round is over, of all that was logged since the last one."""
        # As it is in the history: callbacks before may have dropped some of `logs`.
        self._take(state.log_history[-1] if state.log_history else dict(logs or {}))
        rounds, main = self._rounds(state), state.is_world_process_zero
        # Of an evaluation and of the whole run there are logs, too.
        trained = any(column.metric in self._since for column in COLUMNS)
        if not (self._training and main and trained and rounds > self._lines):
            return
        self._print_line(args, state, rounds)
        self._lines, self._since = rounds, {}

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Print an evaluation, and count its time; `trainer.evaluate()` comes here, too."""
        metrics = metrics or {}
        prefix = next((n.removesuffix("runtime") for n in metrics if n.endswith("_runtime")), None)
        if prefix is None:
            return
        seconds = metrics[f"{prefix}runtime"]
        if self._training:
            self._pace.evaluated(seconds, another=state.global_step != self._evaluated_at)
            self._evaluated_at = state.global_step
        if state.is_world_process_zero:
            title = evaluation_name(prefix)
            if self._training and not state.global_step:
                title += " before training"
            elif self._training:
                title += f" after rollout {self._rounds(state)}/{self._total(state)}"
            for line in wrapped(f"{title}: {evaluation_figures(metrics, prefix)}"):
                say(line)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say how far it has come and how long that took."""
        self._training = False
        if not state.is_world_process_zero:
            return
        verb = "done" if state.global_step >= state.max_steps else "stopped"
        held_out = self._pace.evaluating
        spent = f", {duration(held_out)} of it evaluations" if held_out else ""
        say(
            f"{verb} after rollout {self._rounds(state)}/{self._total(state)}, step "
            f"{state.global_step}/{state.max_steps}, in {duration(self._pace.gone)}{spent}"
        )

    def _take(self, entry: Mapping[str, Any]) -> None:
        for name, value in entry.items():
            if (figure := number(value)) is not None:
                self._since.setdefault(name, []).append(figure)

    def _rounds(self, state: Any) -> int:
        """How many are over; the last one may be cut short."""
        over = state.global_step >= state.max_steps
        return self._total(state) if over else state.global_step // self._steps

    def _total(self, state: Any) -> int:
        return math.ceil(state.max_steps / self._steps)

    # ------------------------------------------------------------------- what is printed

    def _introduction(self, args: Any, state: Any) -> Iterable[str]:
        task, steps = self.task(), self._steps
        method = getattr(args, "variant", None) or type(args).__name__.removesuffix("Config")
        words = [f"{method} trains {task.get('model', 'the model')}"]
        if task.get("environment", "none") != "none":
            words.append(f"in {task['environment']}")
        words += [f"on {task['dataset']}"] if "dataset" in task else []
        yield from wrapped(f"{' '.join(words)}; into {args.output_dir}")
        rollouts = self._total(state)
        episodes = getattr(args, "generation_batch_size", None)
        of = f" of {episodes:,} episodes, {rollouts * episodes:,} in all" if episodes else ""
        updates = f"{steps} optimizer steps each, {state.max_steps:,} in all"
        yield from wrapped(f"{rollouts:,} rollout{'s' * (rollouts > 1)}{of}; {updates}")
        if (rate := getattr(args, "critic_learning_rate", None)) is not None:
            yield f"learning rates: policy {args.learning_rate:g}, critic {rate:g}"
        if state.global_step:
            yield f"resumed after rollout {self._rounds(state)}/{rollouts}, step {state.global_step}"
        if args.logging_strategy == "steps" and state.logging_steps % steps:
            yield from wrapped(
                f"lines come with the log, every {state.logging_steps} steps; logging_steps={steps} "
                "makes it one per rollout"
            )

    def _print_line(self, args: Any, state: Any, rounds: int) -> None:
        total = str(self._total(state))
        place = f"rollout {rounds:>{len(total)}}/{total}"
        self._known |= set(self._since)
        columns = columns_for(self._known, room() - len(place) - _TIMES)
        if columns != self._legend:
            for line in legend(columns, self._legend, len(place)):
                say(line)
            self._legend = columns
        seconds = self._pace.since_line() / (rounds - self._lines)
        left = self._pace.left(state.max_steps, self._evaluations_left(args, state))
        means = {c: mean(self._since.get(c.metric)) for c in columns}
        cells = [f"{shown(value, c.form):>{c.width}}" for c, value in means.items()]
        say(f"{place}{''.join(cells)}{duration(seconds):>8}{duration(left):>8}")
        for metric, what in GUARDS.items():
            so_far = max(self._since.get(metric, [0.0]))
            if (more := round(so_far - self._guards[metric])) > 0:
                say(f"! {more} optimizer step{'s' if more > 1 else ''} {what}")
                self._guards[metric] = so_far
        if mean(self._since.get("turns/mean")) == 0.0:
            return  # nothing was played: these hints are about what was
        for metric, ((low, high), what) in HINTS.items():
            figure = mean(self._since.get(metric))
            if metric not in self._hinted and figure is not None and low <= figure <= high:
                say("! " + what.format(score=shown(mean(self._since.get(SCORE)), ".3g")))
                self._hinted.add(metric)

    def _evaluations_left(self, args: Any, state: Any) -> int:
        """How many evaluations `eval_strategy` has still to come; one is made at the very end, too."""
        if self._evaluated_at >= state.max_steps:
            return 0
        if args.eval_strategy == "steps":
            done = max(self._evaluated_at, self._first) // state.eval_steps
            return math.ceil(state.max_steps / state.eval_steps) - int(done)
        if args.eval_strategy == "epoch":
            return math.ceil(state.num_train_epochs) - math.floor((state.epoch or 0.0) - 1e-6)
        return 0


def steps_per_round(args: Any) -> int:
    """Optimizer steps that train one rollout batch; 1 where there are no rollouts."""
    micro_batches = getattr(args, "steps_per_generation", None) or 1
    steps = (getattr(args, "num_iterations", None) or 1) * micro_batches
    return max(1, steps // args.gradient_accumulation_steps)


def columns_for(known: set[str], space: int) -> list[Column]:
    """Those that have a figure and fit, the most important first, in the order of `COLUMNS`."""
    order = list(IMPORTANCE)
    if SUCCESS not in known:
        order.sort(key=lambda label: label != "score")
    fitting = set()
    for column in sorted(COLUMNS, key=lambda column: order.index(column.label)):
        if column.metric in known and column.width <= space:
            fitting.add(column)
            space -= column.width
    return [column for column in COLUMNS if column in fitting]


def legend(columns: list[Column], before: list[Column], indent: int) -> list[str]:
    """What is new among the columns, and the heading."""
    new = [f"{c.label}: {c.meaning}" for c in columns if c not in before]
    if not before:
        new += ["time: per rollout with its updates", "left: with evaluations"]
    heading = "".join(f"{column.label:>{column.width}}" for column in columns)
    return [*wrapped("; ".join(new), longest=100), f"{'':{indent}}{heading}{'time':>8}{'left':>8}"]


def evaluation_name(prefix: str) -> str:
    """`eval_` -> evaluation; `eval_hard_`, of the data set `hard` -> evaluation of hard."""
    name = prefix.removeprefix("eval").strip("_")
    return f"evaluation of {name}" if name else "evaluation"


def evaluation_figures(metrics: Mapping[str, Any], prefix: str) -> str:
    """Success with its 95 % interval, score, turns and valid actions, as far as there are any."""
    words = []
    for column in COLUMNS[:4]:
        value = number(metrics.get(prefix + column.metric))
        if value is None:
            continue
        words.append(f"{column.label} {shown(value, column.form)}")
        low, high = (number(metrics.get(f"{prefix}{SUCCESS}_{end}")) for end in ("low", "high"))
        if column.metric == SUCCESS and low is not None and high is not None:
            words[-1] += f" ({low:.3f} to {high:.3f})"
    episodes = number(metrics.get(f"{prefix}episodes"))
    words += [f"{episodes:.0f} episodes"] if episodes is not None else []
    return ", ".join([*words, duration(number(metrics.get(f"{prefix}runtime")))])


def mean(values: list[float] | None) -> float | None:
    """None of nothing."""
    return sum(values) / len(values) if values else None


def room() -> int:
    """Characters of a line: a terminal's; a file or a pipe has enough."""
    try:
        narrow = sys.stdout.isatty()
    except (AttributeError, ValueError):  # none at all, or closed
        narrow = False
    return shutil.get_terminal_size().columns if narrow else 1000


def wrapped(text: str, longest: int = 1000) -> list[str]:
    """In lines that fit; words, paths among them, stay whole."""
    width = min(room(), longest)
    return textwrap.wrap(
        text, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def say(line: str) -> None:
    """Print at once, also into a pipe; what cannot be shown costs the line, not the training."""
    try:
        try:
            print(line, flush=True)
        except UnicodeEncodeError:
            encoding = sys.stdout.encoding or "ascii"
            print(line.encode(encoding, "replace").decode(encoding), flush=True)
    except (OSError, ValueError):  # the terminal or the reader has gone, or stdout was closed
        logger.debug("Cannot be printed: %s", line, exc_info=True)
