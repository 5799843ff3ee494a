"""Draw curves of one run or several.

Shows what runs have logged as a picture, a table or CSV: success, clipping, KL, gradients and their bias,
the critic. Runs that differ in their seed alone become one line with a band. Runs that are still going on
are read as far as they are (docs/watching.md).

Examples:
    trl-stppo plot runs/demo
    trl-stppo plot runs/ppo-0 runs/ppo-1 runs/st-0 runs/st-1 --output compared.svg
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..redaction import redacted
from .runs import Run, differing, grouped, read_run

PICTURE = "curves.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="output_dir of a run, finished or not; or a checkpoint, or a file with a log",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"picture to write, .png, .svg or .pdf; default {PICTURE}, in the run's folder if there "
        "is one run",
    )
    parser.add_argument(
        "--metrics",
        nargs="+",
        metavar="NAME",
        help="figures by their names in the log; default success and the paper's diagnostics",
    )
    parser.add_argument(
        "--smooth", type=_positive, default=1, metavar="N", help="average the last N values"
    )
    parser.add_argument(
        "--group",
        nargs="+",
        metavar="SETTING",
        help="settings to group runs by, such as variant; 'none' for every run by itself; "
        "default all settings except seeds and paths",
    )
    parser.add_argument("--title", help="above the panels")
    parser.add_argument(
        "--table",
        nargs="?",
        const="rich",
        choices=("rich", "markdown"),
        help="print the final figures; no picture without --output",
    )
    parser.add_argument(
        "--last",
        type=_positive,
        default=10,
        metavar="N",
        help="values averaged in the table, the last N",
    )
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write all values; no picture without --output"
    )


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0; try 10")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Draw, print and write what the flags ask for.

    Returns:
        The exit code: 0, or 1 where a run cannot be read or drawn; the message is on stderr.
    """
    try:
        runs = [read_run(path) for path in options.runs]
        by = None if options.group is None else ",".join(options.group).split(",")
        by = [] if by == ["none"] else by
        _check_group(by, runs)
        groups = grouped(runs, by)
        draws = options.output is not None or (options.table is None and options.csv is None)
        if options.table is not None:
            _print_table(groups, options)
        if options.csv is not None:
            from .tables import write_csv

            print(f"values: {write_csv(groups, options.metrics, options.csv)}")
        if draws:
            from .curves import draw_groups

            histories = {label: [run.history for run in some] for label, some in groups.items()}
            path = options.output or (runs[0].folder if len(runs) == 1 else Path()) / PICTURE
            title = options.title or (next(iter(groups)) if len(groups) == 1 else None)
            print(
                f"picture: {draw_groups(histories, path, title, options.metrics, options.smooth)}"
            )
    except (OSError, ValueError, ImportError) as error:
        print(redacted(f"trl-stppo plot: {error}"), file=sys.stderr)
        return 1
    return 0


def _check_group(by: list[str] | None, runs: list[Run]) -> None:
    known = {key for run in runs for key in run.settings}
    unknown = [name for name in by or [] if name not in known]
    if unknown:
        tell = ", ".join(name for name in ("variant", *differing(runs)) if name in known)
        differ = f"These runs differ in: {tell}" if tell else "These runs have written down none"
        raise ValueError(
            f"`group={' '.join(by or [])}`: no run has written down {', '.join(unknown)}. Name "
            f"settings, or 'none' for every run by itself. {differ}."
        )


def _print_table(groups: dict[str, list[Run]], options: argparse.Namespace) -> None:
    from .curves import chosen, measured
    from .tables import markdown, print_table

    histories = {label: [run.history for run in runs] for label, runs in groups.items()}
    known = measured(histories)
    metrics = []
    for diagnostic in chosen(histories, options.metrics):
        also = diagnostic.held_out
        metrics += [diagnostic.metric, *([also] if also in known else [])]
    if options.table == "markdown":
        print(markdown(groups, metrics, options.last))
    else:
        print_table(groups, metrics, options.last)
