"""Draw curves of one run or several.

One picture shows success, KL, clipping, entropy, scale and explained variance
from the logs of all runs, also of a run that is still training
(docs/watching.md).

Examples:
    trl-stppo plot runs/demo
    trl-stppo plot runs/ppo runs/st-ppo --output compared.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from ..errors import MissingPackageError
from .runs import Run, read_run

PICTURE = "curves.png"


def draw_curves(runs: Mapping[str, Run], path: Path) -> Path:
    """Draw the panels of labelled runs into a picture, with circles for evaluations; return its path."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError("matplotlib", "plot") from error

    panels = list(dict.fromkeys(panel for run in runs.values() for panel in run.panels()))
    if not panels:
        raise ValueError("`runs`: no run has a metric of the panels.")
    columns, rows = min(4, len(panels)), -(-len(panels) // 4)
    figure = Figure(figsize=(3.5 * columns, 2.5 * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        for label, run in runs.items():
            (line,) = axis.plot(*run.points(panel.metric), ".-", markersize=3, label=label)
            evaluated = run.points(f"eval_{panel.metric}")
            axis.plot(*evaluated, "o", fillstyle="none", color=line.get_color())
        axis.set(title=panel.title, xlabel="update", ylabel=panel.unit)
        axis.set_ylim(*panel.limits)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `plot` to the parser."""
    about = "output_dir of a run, or its log"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=about)
    about = f"picture to write; default {PICTURE}, in the run's folder if there is one run"
    parser.add_argument("--output", type=Path, metavar="FILE", help=about)


def run(options: argparse.Namespace) -> int:
    """Draw the curves; return the exit code."""
    runs = {str(path): read_run(path) for path in options.runs}
    (first, *others) = runs.values()
    output = options.output or (Path() if others else first.folder) / PICTURE
    print(f"picture: {draw_curves(runs, output)}")
    return 0
