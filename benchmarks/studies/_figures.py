"""Figures of records: curves by arm, curves by seed, and final values over the learning rate."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from _records import Record
from _report import curve, drop, final
from matplotlib.ticker import MaxNLocator, NullLocator

# Rollouts of a moving mean.
WINDOW = 3
# A drop of this size below the best rollout is a fall.
FALL = 0.15
# From this number of runs on a band leaves out the highest and the lowest one.
MANY = 5


def draw_curves(records: Sequence[Record], path: Path, metric: str | None = None) -> None:
    """Draw a panel per study, task and setting: a line through the means over seeds, with a band.

    Args:
        records: of any studies.
        path: of the picture.
        metric: a curve of the records, by default the one by which a run is judged.
    """
    panels = groups(records, "study", "task", "setting")
    styles = colours(records)
    figure, axes = panels_of(len(panels))
    for axis, (where, runs) in zip(axes, sorted(panels.items()), strict=True):
        for (arm,), own in groups(runs, "arm").items():
            lines = [smooth(curve(run, metric)) for run in own]
            points = [sorted(values) for values in zip(*filter(None, lines), strict=False)]
            rollouts = range(1, len(points) + 1)
            axis.plot(rollouts, [statistics.fmean(p) for p in points], label=arm, **styles[arm])
            inner = [p[1:-1] if len(p) >= MANY else p for p in points]
            low, high = [p[0] for p in inner], [p[-1] for p in inner]
            axis.fill_between(rollouts, low, high, alpha=0.15, linewidth=0, **styles[arm])
        axis.set_title(", ".join(where), fontsize=9)
        axis.set_xlabel("rollout")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_ylabel(metric or runs[0]["measure"])
    save(figure, axes, path, unit=metric is None)


def draw_sweep(records: Sequence[Record], path: Path, labels: Mapping[str, str], height: float) -> None:
    """Draw final values over the learning rate, a panel per task; of other tasks a panel per arm.

    Args:
        records: of one study.
        path: of the picture.
        labels: names of arms, and titles of tasks.
        height: success from which on a drop counts.
    """
    styles = colours(records)
    swept = [record for record in records if "learning_rate" in record["overrides"]]
    others = [record for record in records if "learning_rate" not in record["overrides"]]
    panels = list(groups(swept, "task").items()) + list(groups(others, "task", "arm").items())
    figure, axes = panels_of(len(panels), columns=2)
    for axis, ((task, *arm), runs) in zip(axes, panels, strict=True):
        title = labels.get(task, task)
        if arm:
            fallen = sum(drop(curve(run), height) >= FALL for run in runs)
            title += f"\n{labels.get(arm[0], arm[0])}: {fallen} of {len(runs)} fall"
            for run in runs:
                values = curve(run)
                axis.plot(range(1, len(values) + 1), values, linewidth=0.7, **styles[arm[0]])
            axis.set_xlabel("rollout")
        else:
            points = [len(point) for point in groups(runs, "arm", "setting").values()]
            few, many = min(points), max(points)
            title += f"\nruns per point: {few}" + (f" to {many}" if many > few else "")
            draw_rates(axis, runs, styles, labels)
        axis.set_title(title, fontsize=9)
        axis.set_ylabel(runs[0]["measure"] if arm else f"final {runs[0]['measure']}")
    save(figure, axes, path, unit=True)


def draw_rates(axis: Any, runs: Sequence[Record], styles: Any, labels: Mapping[str, str]) -> None:
    """Draw a line per arm through the means over seeds, and a dot per run."""
    for (arm,), own in groups(runs, "arm").items():
        finals: dict[float, list[float]] = {}
        for run in own:
            finals.setdefault(run["overrides"]["learning_rate"], []).append(final(run))
        rates = sorted(finals)
        means = [statistics.fmean(finals[rate]) for rate in rates]
        axis.plot(rates, means, label=labels.get(arm, arm), **styles[arm])
        dots = [(rate, value) for rate in rates for value in finals[rate]]
        axis.scatter(*zip(*dots, strict=True), s=8, alpha=0.5, **styles[arm])
    axis.set_xscale("log")
    rates = sorted({run["overrides"]["learning_rate"] for run in runs})
    axis.set_xticks(rates, [f"{rate:g}" for rate in rates], fontsize=8)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("learning rate")


def groups(records: Sequence[Record], *names: str) -> dict[tuple[str, ...], list[Record]]:
    """Group records by fields, in the order in which they come."""
    found: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        found.setdefault(tuple(record[name] for name in names), []).append(record)
    return found


def colours(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Give each arm a colour, the same in all panels."""
    arms = dict.fromkeys(record["arm"] for record in records)
    return {arm: {"color": plt.get_cmap("tab10")(i % 10)} for i, arm in enumerate(arms)}


def smooth(values: Sequence[float]) -> list[float]:
    """Return the moving mean."""
    return [statistics.fmean(values[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(values))]


def panels_of(count: int, columns: int = 4) -> tuple[Any, list[Any]]:
    """Make a figure with so many panels, at most `columns` in a row.

    Raises:
        ValueError: there is nothing to draw.
    """
    if not count:
        raise ValueError("no record has what the figure shows")
    columns = min(count, columns)
    rows = -(-count // columns)
    size = (3.1 * columns + 1, 2.9 * rows + 0.4)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat[count:]:
        axis.remove()
    return figure, list(axes.flat[:count])


def save(figure: Any, axes: Sequence[Any], path: Path, unit: bool) -> None:
    """Add the legend and write the picture."""
    handles = {
        label: handle
        for axis in axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    for axis in axes:
        axis.grid(alpha=0.3)
        if unit:
            axis.set_ylim(-0.02, 1.02)
    columns = 2 if len(axes) == 1 else 4
    figure.legend(handles.values(), handles, fontsize=8, ncols=columns, loc="outside lower center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
