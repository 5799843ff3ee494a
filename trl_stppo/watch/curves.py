"""Plot the learning curves of runs; needs matplotlib (extra `plot`)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .figures import FALLS, SCORE, SUCCESS, number
from .runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

History = Sequence[Mapping[str, Any]]
FORMATS = (".png", ".svg", ".pdf")


class Panel(NamedTuple):
    """One panel of the figure: metric, title, unit, limits of the axis."""

    metric: str
    title: str
    unit: str
    limits: tuple[float | None, float | None] = (0, None)  # of the axis; None: from the data


OUTCOMES = (
    Panel(SUCCESS, "success", "share of episodes", (-0.02, 1.02)),
    Panel(SCORE, "score", "reward", (None, None)),
)
DIAGNOSTICS = (
    Panel("policy/approx_kl", "KL to the sampling policy", "nats per token"),
    Panel("policy/clip_fraction", "clip fraction", "share of tokens"),
    Panel("policy/entropy", "entropy", "nats per token"),
    Panel("tools/call_frequency", "tool calls", "per episode"),
    Panel("clip_bias/scale", "scale of the update", "factor", (-0.02, 1.02)),
    Panel("value/explained_variance", "explained variance", "share", (-1.05, 1.05)),
)
# Okabe and Ito's, for every kind of colour vision.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
STYLE: dict[Any, Any] = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "font.size": 9,
    "svg.hashsalt": "trl-stppo",  # the same picture gives the same file
}


def draw_curves(runs: Mapping[str, History | Run], path: Path, title: str | None = None) -> Path:
    """Plot success, KL, clipping, entropy, scale and explained variance of runs; return the path.

    Circles are evaluations, triangles are falls (`guard/falls`), dotted lines are resumes.

    Args:
        runs: by label, what `read_run` returns, or `trainer.state.log_history`. Panels without a value are
            left out. The axis counts updates, or optimizer steps if a run has no number of steps per update.
        path: of the picture, which ends in .png, .svg or .pdf.
        title: above the panels.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"`output={path}`: must end in {', '.join(FORMATS)}.")
    drawn = {
        label: run if isinstance(run, Run) else Run(Path(), list(map(dict, run)))
        for label, run in runs.items()
    }
    by_update = all(run.steps_per_rollout for run in drawn.values())
    outcomes, diagnostics = (
        [p for p in panels if any(points(run.history, p.metric)[0] for run in drawn.values())]
        for panels in (OUTCOMES, DIAGNOSTICS)
    )
    panels = [*outcomes[:1], *diagnostics]
    if not panels:
        raise ValueError("`runs`: no run has a metric of these panels.")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    columns = -(-len(panels) // 2) if len(panels) > 3 else len(panels)
    rows = -(-len(panels) // columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(3.5 * columns, 2.3 * rows + 0.7), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis, panel in zip(axes.flat, panels, strict=False):
            _draw(axis, panel, drawn, by_update)
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        if len(runs) > 1:
            handles, labels = axes[0, 0].get_legend_handles_labels()
            columns = max(1, 100 // (max(map(len, labels)) + 8))
            figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
        figure.suptitle(title or "", fontsize=10, parse_math=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        figure.savefig(path, dpi=120, metadata=dates.get(path.suffix.lower()))
    return path


def points(history: History, metric: str, steps: int = 1) -> tuple[list[int], list[float]]:
    """Return the updates, of this many optimizer steps, and a metric's mean in each, sorted.

    The last entry of a step counts. Values that are not finite are left out.
    """
    entries = sorted((entry for entry in history if metric in entry), key=lambda e: e["step"])
    last = {entry["step"]: number(entry[metric]) for entry in entries}
    updates: dict[int, list[float]] = {}
    for step, value in last.items():
        if value is not None:
            updates.setdefault(math.ceil(step / steps), []).append(value)
    return list(updates), [statistics.fmean(values) for values in updates.values()]


def _draw(axis: Axes, panel: Panel, runs: Mapping[str, Run], by_update: bool) -> None:
    for index, (label, run) in enumerate(runs.items()):
        history, per_update = run.history, (run.steps_per_rollout if by_update else None) or 1
        colour = COLOURS[index % len(COLOURS)]
        updates, values = points(history, panel.metric, per_update)
        marker = "." if len(updates) < 4 else None
        axis.plot(updates, values, color=colour, linewidth=1.5, marker=marker, label=label)
        evaluated = points(history, f"eval_{panel.metric}", per_update)
        axis.plot(*evaluated, "o", color=colour, fillstyle="none")
        for step in run.resumed:
            axis.axvline(step / per_update, color=colour, linestyle=":", linewidth=0.8)
        if panel in OUTCOMES:
            seen = falls(history, per_update)
            at = [(x, y) for x, y in zip(updates, values, strict=True) if x in seen]
            axis.plot(*(zip(*at, strict=True) if at else ((), ())), "v", color="#b00020")
    axis.set_title(panel.title, fontsize=10, parse_math=False)
    axis.set_xlabel("update" if by_update else "optimizer step", fontsize=8)
    axis.set_ylabel(panel.unit, fontsize=8)
    axis.set_ylim(*panel.limits)
    axis.grid(color="#dddddd", linewidth=0.6)


def falls(history: History, steps: int = 1) -> set[int]:
    """Return the updates, of this many optimizer steps, in which the counter `guard/falls` increased."""
    at, counts = points(history, FALLS)
    before = [0.0, *counts]
    grown = (step for step, old, new in zip(at, before, counts, strict=False) if new > old)
    return {math.ceil(step / steps) for step in grown}
