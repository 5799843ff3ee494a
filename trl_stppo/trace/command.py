"""Write one HTML page of a run's recorded episodes.

The page needs no network. It filters and sorts the recorded episodes (--trace_episodes of `train`), and
colours each token by role, ratio, advantage, value, or clipping (docs/watching.md).

Examples:
    trl-stppo trace runs/demo --open
"""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from .page import MAX_EPISODES, build_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `trace` to the parser."""
    parser.add_argument("run", metavar="RUN", help="output_dir of a run, or the trace folder in it")
    parser.add_argument("--output", metavar="PAGE", help="the page; default RUN/trace.html")
    parser.add_argument(
        "--max_episodes",
        type=int,
        default=MAX_EPISODES,
        metavar="N",
        help=f"at most N episodes, evenly from first to last; default {MAX_EPISODES}, 0 for all",
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def run(options: argparse.Namespace) -> int:
    """Write the HTML page of a run's episodes; return the exit code."""
    folder = Path(options.run)
    output = Path(options.output) if options.output else folder / "trace.html"
    if output.is_dir():
        output = output / "trace.html"
    try:
        page = build_page(folder, output, max_episodes=max(0, options.max_episodes) or None)
    except OSError as error:
        raise OSError(f"`--output {output}` cannot be written: {error}.") from error
    of = f" of {page.recorded}" if page.episodes < page.recorded else ""
    size = page.path.stat().st_size / 2**20
    print(f"{page.path}: {page.episodes}{of} episodes, {size:.1f} MiB{page.left_out}")
    if options.open:
        webbrowser.open(page.path.resolve().as_uri())
    return 0
