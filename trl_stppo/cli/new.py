"""Make a folder with an agent to change: environment, rows, settings, training.

The agent learns a guessing game on a CPU in two minutes (docs/tutorial.md).
With --model a pretrained model learns it, after a warm start by TRL's
SFTTrainer (docs/pretrained.md).

  --model NAME  a pretrained model: Hub id or folder; default: a small new model

Examples:
    trl-stppo new games/guess
    trl-stppo new games/number --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `new` to the parser."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="to make; must not exist")
    parser.add_argument("--model", metavar="NAME", help="a pretrained model: Hub id or folder")


def run(options: argparse.Namespace) -> int:
    """Write the template's files into the new folder; return the exit code."""
    folder: Path = options.folder
    model = options.model
    if model is not None and Path(model).exists():
        model = str(Path(model).resolve())
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise FileExistsError(f"`FOLDER={folder}` exists; name a new one.") from error
    template = Path(__file__).parent / "template" / ("small" if model is None else "pretrained")
    for file in template.rglob("*.*"):
        path = folder / str(file.relative_to(template)).removesuffix(".txt")
        path.parent.mkdir(exist_ok=True)
        text = file.read_text(encoding="utf-8").replace('"{model}"', repr(model))
        path.write_text(text, encoding="utf-8")
    print(f"cd {folder}")
    if model is None:
        print("python warm_start.py  # makes a small model that knows the words, in half a minute")
        print("python train.py       # trains it, in two minutes on a CPU")
    else:
        print("python warm_start.py  # teaches the model the form of an answer")
        print("python train.py       # trains it with LoRA; its lines say how long that takes")
        print("trl-stppo evaluate --config run.yaml --models runs/careless runs/agent --show 2")
    return 0
