"""What a person sees of a run: live lines, the table before and after, the curves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

SUCCESS, SCORE = "episode/success_rate", "episode/score"
# Panels of the figure: title, axis label, metric, whether the axis starts at zero.
PANELS = (
    ("success of rollouts", "share of episodes", SUCCESS),
    ("clip fraction", "share of tokens", "policy/clip_fraction"),
    ("KL to the sampling policy", "nats per token", "policy/approx_kl"),
    ("clipping bias ‖C‖", "L2 norm", "clip_bias/norm"),
)


class ProgressLines(TrainerCallback):
    """One line per rollout: success, clipping, KL, ‖C‖, speed, time left."""

    def __init__(self, trainer: Any) -> None:
        self._console = Console(highlight=False)
        self._started, self._first_step = time.monotonic(), 0
        self._metrics: dict[str, float] = {}
        for callback in list(trainer.callback_handler.callbacks):
            if isinstance(callback, ProgressCallback | PrinterCallback):
                trainer.remove_callback(callback)
        trainer.add_callback(self)

    def start(self, before: dict[str, float]) -> None:
        """Print the heading, and where the agent stands."""
        if f"eval_{SUCCESS}" in before:
            self._console.print(
                f"held-out success before training: {before[f'eval_{SUCCESS}']:.3f}"
            )
        self._console.print("  step        success   clip      KL     ‖C‖  scale   tok/s   left")
        self._started = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A resumed run has steps behind it that took none of this one's time."""
        self._first_step = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print when a new rollout has been trained on."""
        if not state.is_world_process_zero or not logs or "policy/clip_fraction" not in logs:
            return
        self._metrics |= {k: v for k, v in logs.items() if v is not None}
        spent = time.monotonic() - self._started
        done = max(1, state.global_step - self._first_step)
        left = spent / done * (state.max_steps - state.global_step)
        get = lambda name: self._metrics.get(name, float("nan"))  # noqa: E731
        self._console.print(
            f"{state.global_step:5d}/{state.max_steps:<5d}  {get(SUCCESS):7.3f}"
            f"  {get('policy/clip_fraction'):5.3f}  {get('policy/approx_kl'):6.4f}"
            f"  {get('clip_bias/norm'):6.3f}  {get('clip_bias/scale'):5.2f}"
            f"  {get('perf/update_tokens_per_second'):6.0f}  {left:4.0f}s"
        )


def comparison_table(before: dict[str, float], after: dict[str, float]) -> None:
    """Held-out success before and after, with 95 % intervals."""
    table = Table(title=f"Held-out rows, {after['eval_episodes']} episodes")
    success = f"eval_{SUCCESS}" in after
    for column in (
        "",
        "success" if success else "score",
        "95 % interval",
        "turns",
        "valid actions",
    ):
        table.add_column(column, justify="right" if column else "left")
    for name, metrics in (("before", before), ("after", after)):
        # Reward functions alone say nothing about success.
        shown = SUCCESS if f"eval_{SUCCESS}" in metrics else SCORE
        rate, low, high = (
            metrics.get(f"eval_{shown}{bound}", float("nan")) for bound in ("", "_low", "_high")
        )
        table.add_row(
            name,
            f"{rate:.3f}",
            f"{low:.3f} - {high:.3f}",
            f"{metrics['eval_turns/mean']:.2f}",
            f"{metrics.get('eval_turns/valid_action_rate', float('nan')):.3f}",
        )
    Console().print(table)


def plan_table(rows: list[tuple[str, str, str]], notes: list[str], problems: list[str]) -> None:
    """What a run would be: section, name and value; what is not known; what would stop it."""
    console = Console(highlight=False)
    table = Table(title="What would run", show_header=False)
    before = None
    for section, name, value in rows:
        if before not in (None, section):
            table.add_section()
        table.add_row(section if section != before else "", escape(name), escape(value))
        before = section
    if rows:
        console.print(table)
    for note in notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    for problem in problems:
        console.print(f"PROBLEM: {problem}", markup=False, soft_wrap=True)
    console.print(
        f"{len(problems)} problem(s): this would not start."
        if problems
        else "This would start, as far as can be told without weights and network."
    )


def plot_curves(log_history: list[dict[str, Any]], path: Path, title: str | None) -> Path:
    """Learning curve, clip fraction, KL and ‖C‖ over optimizer steps, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(9, 6), sharex=True, layout="constrained")
    for axis, (name, label, metric) in zip(axes.flat, PANELS, strict=True):
        points = [(e["step"], e[metric]) for e in log_history if e.get(metric) is not None]
        if points:
            axis.plot(*zip(*points, strict=True), linewidth=1.2)
        else:
            axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes)
        axis.set_title(name, fontsize=10)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("optimizer step")
    figure.suptitle(title or "")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
