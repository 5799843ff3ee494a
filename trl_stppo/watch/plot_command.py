"""Draw curves of one run or several.

Draws success, KL, clipping, entropy, scale and explained variance from the logs of runs, also of a run that
is still training (docs/watching.md).

Examples:
    trl-stppo plot runs/demo
    trl-stppo plot runs/ppo runs/st-ppo --output compared.svg
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..redaction import redacted
from .runs import read_run

PICTURE = "curves.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `plot` to the parser."""
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="output_dir of a run, a checkpoint, or a file with a log",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"picture to write, .png, .svg or .pdf; default {PICTURE}, in the run's folder if there "
        "is one run",
    )
    parser.add_argument("--title", help="above the panels")


def run(options: argparse.Namespace) -> int:
    """Draw the curves; return 0, or 1 if a run cannot be read or drawn."""
    try:
        from .curves import draw_curves

        runs = [read_run(path) for path in options.runs]
        names = [run.folder.resolve().name for run in runs]
        unique = len(set(names)) == len(names)
        labels = names if unique else [str(path) for path in options.runs]
        path = options.output or (runs[0].folder if len(runs) == 1 else Path()) / PICTURE
        title = options.title or (names[0] if len(runs) == 1 else None)
        print(f"picture: {draw_curves(dict(zip(labels, runs, strict=True)), path, title)}")
    except (OSError, ValueError, ImportError) as error:
        print(redacted(f"trl-stppo plot: {error}"), file=sys.stderr)
        return 1
    return 0
