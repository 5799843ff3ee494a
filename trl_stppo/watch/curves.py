"""Learning curves and the paper's diagnostics as pictures; needs matplotlib (extra `plot`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .figures import number
from .line_ends import End, end_labels, label_ends

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

History = Sequence[Mapping[str, Any]]
FORMATS = (".png", ".svg", ".pdf")


class Diagnostic(NamedTuple):
    """One panel.

    Attributes:
        metric: name in the log.
        title: of the panel.
        unit: label of the axis.
        spread: whether its size says more than its value: a logarithmic axis where it spans much.
        limits: of the axis, None where they follow from the data.
        held_out: the same figure of evaluation, drawn as circles.
    """

    metric: str
    title: str
    unit: str
    spread: bool = False
    limits: tuple[float, float] | None = None
    held_out: str | None = None


DIAGNOSTICS = (
    Diagnostic(
        "episode/success_rate",
        "success rate (training episodes)",
        "share of episodes",
        limits=(0, 1),
        held_out="eval_episode/success_rate",
    ),
    Diagnostic("episode/score", "score", "reward", held_out="eval_episode/score"),
    Diagnostic("policy/clip_fraction", "clip fraction", "share of tokens"),
    Diagnostic("policy/approx_kl", "KL to the sampling policy", "nats per token", spread=True),
    Diagnostic("policy/entropy", "entropy", "nats per token"),
    Diagnostic("clip_bias/grad_norm", "kept gradient ‖g‖", "L2 norm", spread=True),
    Diagnostic("clip_bias/norm", "clipping bias ‖C‖", "L2 norm", spread=True),
    Diagnostic("clip_bias/cosine", "cos(g, C)", "cosine"),
    Diagnostic("clip_bias/scale", "scale of the update", "factor", limits=(0, 1)),
    Diagnostic("value/explained_variance", "explained variance", "share of the returns' variance"),
    Diagnostic("sampling/sampling_logp_difference/mean", "gap to the sampler", "nats per token"),
    Diagnostic("turns/mean", "turns", "per episode"),
    Diagnostic("turns/valid_action_rate", "valid actions", "share of turns", limits=(0, 1)),
)
# Okabe and Ito's, told apart with every kind of colour vision; the lines differ in style, too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
STYLES: tuple[Any, ...] = ("-", "--", "-.", ":")
STYLE: dict[Any, Any] = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "text.color": "black",
    "axes.labelcolor": "black",
    "axes.edgecolor": "#666666",
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "font.size": 9,
    "svg.hashsalt": "trl-stppo",  # the same picture gives the same file
}
# A logarithmic axis is used from this ratio of the largest to the smallest value on.
MUCH = 50.0


def draw_curves(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, title: str | None = None
) -> Path:
    """The course of some runs: success, clipping, KL, ‖g‖, ‖C‖ and the other diagnostics.

    Args:
        runs: `trainer.state.log_history` by label. Figures that none of them has measured are left out.
        path: of the picture; its ending, .png, .svg or .pdf, says which kind.
        title: above the panels.

    Returns:
        The path.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: another ending, or nothing to draw.
    """
    return draw_groups({label: [history] for label, history in runs.items()}, path, title)


def draw_groups(
    groups: Mapping[str, Sequence[History]],
    path: Path,
    title: str | None = None,
    metrics: Sequence[str] | None = None,
    smooth: int = 1,
) -> Path:
    """Likewise, of groups of runs that differ in the seed only.

    A group of several is drawn as their mean, in a band from the lowest to the highest of them; between
    the steps at which a run has logged it is interpolated, and where it has ended it counts no more.

    Args:
        groups: histories by label.
        path: as in `draw_curves`.
        title: likewise.
        metrics: what to draw; None for `DIAGNOSTICS` as far as measured.
        smooth: values of a run that are averaged, the last so many at each step.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(
            f"`output={path}`: a picture's name ends in {', '.join(FORMATS)}. Name one of these kinds, "
            f"such as {path.with_suffix(FORMATS[0]).name}."
        )
    diagnostics = chosen(groups, metrics)
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Drawing curves needs matplotlib: pip install matplotlib. `trl-stppo plot --table` "
            "and `--csv` do without."
        ) from error
    columns = min(3, len(diagnostics))
    rows = -(-len(diagnostics) // columns)
    ends = end_labels(groups)
    with mpl.rc_context(STYLE):
        size = (3.5 * columns + bool(ends), 2.3 * rows + 0.7)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, sharex=True)
        drawn = [
            _draw_panel(axis, diagnostic, groups, smooth)
            for axis, diagnostic in zip(axes.flat, diagnostics, strict=False)
        ]
        for axis in axes.flat[len(diagnostics) :]:
            axis.set_axis_off()
        for axis in axes.flat[max(0, len(diagnostics) - columns) : len(diagnostics)]:
            axis.set_xlabel("optimizer step")
            axis.tick_params(labelbottom=True)
        ended = [end for end in drawn[0] if end is not None]
        ends = ends if len(ended) == len(ends) else []  # or a line would go without a name
        label_ends(axes[0, 0], ended, ends, [_line(index) for index in range(len(ends))])
        _add_words(figure, groups if not ends else {}, _notes(groups, diagnostics, smooth), title)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(
            path, dpi=120, metadata=None if path.suffix.lower() == ".png" else _dateless(path)
        )
    return path


def chosen(
    groups: Mapping[str, Sequence[History]], metrics: Sequence[str] | None
) -> list[Diagnostic]:
    """The panels to draw.

    Raises:
        ValueError: nothing was measured that could be drawn, or a metric is not known.
    """
    known = measured(groups)
    if metrics is None:
        found = [diagnostic for diagnostic in DIAGNOSTICS if diagnostic.metric in known]
        if not found:
            raise ValueError(
                "`metrics=None`: none of the runs has logged a figure that is drawn by default. Name "
                f"some with --metrics; there are: {', '.join(sorted(known)) or 'none'}."
            )
        return found
    unknown = [name for name in metrics if name not in known]
    if unknown:
        raise ValueError(
            f"`metrics={' '.join(metrics)}`: no run has logged {', '.join(unknown)}. Name some of those "
            f"that there are: {', '.join(sorted(known)) or 'none'}."
        )
    named = {diagnostic.metric: diagnostic for diagnostic in DIAGNOSTICS}
    return [named.get(name, Diagnostic(name, name, "")) for name in metrics]


def measured(groups: Mapping[str, Sequence[History]]) -> set[str]:
    """Names of all figures that some run has a number for."""
    return {
        name
        for histories in groups.values()
        for history in histories
        for entry in history
        for name, value in entry.items()
        if name not in ("step", "epoch") and number(value) is not None
    }


def points(history: History, metric: str, smooth: int = 1) -> tuple[list[float], list[float]]:
    """Steps and values of one run; None and NaN are left out, and of two at one step the later counts."""
    at: dict[float, float] = {}
    for entry in history:
        value = number(entry.get(metric))
        if value is not None:
            at[float(entry["step"])] = value
    steps = sorted(at)
    values = [at[step] for step in steps]
    if smooth > 1:
        last = [values[max(0, i + 1 - smooth) : i + 1] for i in range(len(values))]
        values = [sum(window) / len(window) for window in last]
    return steps, values


def band(
    curves: Sequence[tuple[list[float], list[float]]],
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Steps, and at each the mean, the lowest and the highest of the curves that reach there."""
    import numpy as np

    drawn = [curve for curve in curves if curve[0]]
    steps = sorted({step for curve in drawn for step in curve[0]})
    table = [np.interp(steps, xs, ys, left=np.nan, right=np.nan) for xs, ys in drawn]
    if not table:
        return [], [], [], []
    values = np.array(table)
    return (
        steps,
        np.nanmean(values, axis=0).tolist(),
        np.nanmin(values, axis=0).tolist(),
        np.nanmax(values, axis=0).tolist(),
    )


def _draw_panel(
    axis: Axes, diagnostic: Diagnostic, groups: Mapping[str, Sequence[History]], smooth: int
) -> list[End | None]:
    """Draw it; where each group's line ends."""
    curves = [
        band([points(history, diagnostic.metric, smooth) for history in histories])
        for histories in groups.values()
    ]
    everything = [value for _, _, low, high in curves for value in (*low, *high)]
    floor = _log_floor(everything) if diagnostic.spread else None
    ends: list[End | None] = []
    for index, (histories, curve) in enumerate(zip(groups.values(), curves, strict=True)):
        line = _line(index)
        colour = line["color"]
        if diagnostic.held_out is not None:  # few, and exact: never smoothed
            at, circles, *_ = band([points(history, diagnostic.held_out) for history in histories])
            axis.plot(at, circles, "o", markersize=5, markerfacecolor="white", color=colour)
            everything += circles
        steps, mean, low, high = curve if floor is None else _positive(*curve, floor)
        axis.plot(steps, mean, marker="." if len(steps) < 4 else None, **line)
        ends.append((steps[-1], mean[-1]) if steps and math.isfinite(mean[-1]) else None)
        if len(histories) > 1:
            axis.fill_between(steps, low, high, alpha=0.15, linewidth=0, color=colour)
    axis.set_title(diagnostic.title, fontsize=10, parse_math=False)
    axis.set_ylabel(diagnostic.unit, fontsize=8)
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    _scale(axis, diagnostic, everything, floor)
    return ends


def _line(index: int) -> dict[str, Any]:
    """How the line of a group looks, in the panels and in the legend."""
    colour, style = COLOURS[index % len(COLOURS)], STYLES[index % len(STYLES)]
    return {"color": colour, "linestyle": style, "linewidth": 1.5}


def _log_floor(values: Sequence[float]) -> float | None:
    """The lowest value of a logarithmic axis, where values span much; None for an axis as usual."""
    positive = [value for value in values if value > 0]
    return min(positive) if positive and max(positive) > MUCH * min(positive) else None


def _positive(
    steps: list[float], mean: list[float], low: list[float], high: list[float], floor: float
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Without the steps at which all runs are at zero, for which a logarithmic axis has no place.

    Where some of them are, the band goes down to the axis' lowest value.
    """
    kept = [i for i, value in enumerate(high) if value > 0]
    return (
        [steps[i] for i in kept],
        [mean[i] for i in kept],
        [max(low[i], floor) for i in kept],
        [high[i] for i in kept],
    )


def _scale(
    axis: Axes, diagnostic: Diagnostic, values: Sequence[float], floor: float | None
) -> None:
    """A logarithmic axis where it was decided on; otherwise from zero, or the figure's own limits."""
    if floor is not None:
        axis.set_yscale("log")
    elif diagnostic.limits is not None and values:
        low, high = diagnostic.limits
        axis.set_ylim(min(low - 0.02, *values), max(high + 0.02, *values))
    elif values and min(values) >= 0 and 0 < 1.06 * max(values) < math.inf:
        axis.set_ylim(0, 1.06 * max(values))


def _notes(
    groups: Mapping[str, Sequence[History]], diagnostics: Sequence[Diagnostic], smooth: int
) -> list[str]:
    """What bands, points and circles are."""
    repeated = any(len(histories) > 1 for histories in groups.values())
    notes = ["mean of the runs, band from lowest to highest"] if repeated else []
    notes += [f"each point the mean of the last {smooth} values"] if smooth > 1 else []
    evaluated = measured(groups) & {d.held_out for d in diagnostics}
    return notes + (["circles: held-out rows"] if evaluated else [])


def _add_words(
    figure: Figure, groups: Mapping[str, Sequence[History]], notes: list[str], title: str | None
) -> None:
    """Title, legend of those groups, and notes."""
    from matplotlib.lines import Line2D

    heading = "\n".join(filter(None, [title, "; ".join(notes)]))
    shown = (
        list(groups.items()) if max(map(len, groups.values()), default=0) * len(groups) > 1 else []
    )
    if not shown:
        figure.suptitle(heading, fontsize=10, parse_math=False)
        return
    handles = [Line2D([], [], **_line(index)) for index in range(len(shown))]
    labels = [f"{name} ({len(runs)} runs)" if len(runs) > 1 else name for name, runs in shown]
    widest = max(map(len, labels), default=0)
    legend = figure.legend(
        handles,
        labels,
        loc="outside upper center",
        ncols=max(1, min(len(labels), 100 // (widest + 8))),
        frameon=False,
        handlelength=3,
        title=heading or None,
        title_fontsize=10,
    )
    legend.get_title().set_multialignment("center")
    for text in (legend.get_title(), *legend.get_texts()):
        text.set_parse_math(False)


def _dateless(path: Path) -> dict[str, Any]:
    """So that the same picture gives the same file."""
    return {"Date": None} if path.suffix.lower() == ".svg" else {"CreationDate": None}
