"""Make a folder with an agent to change: environment, rows, settings, training.

The agent learns a guessing game on a CPU in two minutes (docs/tutorial.md).

Examples:
    trl-stppo new games/guess
"""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument `FOLDER` to the parser."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="to make; must not exist")


def run(options: argparse.Namespace) -> int:
    """Write the template's files into the new folder; return the exit code."""
    folder: Path = options.folder
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise FileExistsError(f"`FOLDER={folder}` exists; name a new one.") from error
    for file in files(__package__).joinpath("template").iterdir():
        name = file.name.removesuffix(".txt")
        (folder / name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    print(f"cd {folder}")
    print("python warm_start.py  # makes a small model that knows the words, in half a minute")
    print("python train.py       # trains it, in two minutes on a CPU")
    return 0
