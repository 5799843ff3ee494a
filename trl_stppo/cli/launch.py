"""`trl-stppo train` and `evaluate` through accelerate's launcher, as TRL's own commands go.

Words that are no flags of the command are the launcher's. Where they say nothing and accelerate would
start one process, that is this one: nothing is imported twice, and signals arrive where they are meant.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from ..wording import did_you_mean
from .usage import UsageError, worded

REFUSED = ("fsdp1",)  # TRL ships it; FSDP1 is not supported (docs/many_gpus.md)
LAUNCHED = "trl_stppo.cli.launched"
# What a launcher tells its processes.
TOLD = ("LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION")


def told() -> bool:
    """Whether a launcher has started this process."""
    return any(name in os.environ for name in TOLD)


# ------------------------------------------------------------------- accelerate's flags


@functools.cache
def launch_parser() -> argparse.ArgumentParser:
    """The parser of `accelerate launch`, which takes files by name as well."""
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    parser.add_argument("--accelerate_config", dest="config_file", type=config_file)
    parser.error = _refuse
    return parser


def _refuse(message: str) -> NoReturn:
    raise UsageError(f"accelerate launch: {worded(message)}")


@functools.cache
def launch_flags() -> frozenset[str]:
    """Flags that are handed to the launcher, without dashes: read, as its import takes seconds."""
    spec = importlib.util.find_spec("accelerate")
    text = (
        Path(str(spec and spec.origin))
        .with_name("commands")
        .joinpath("launch.py")
        .read_text("utf-8")
    )
    names = re.findall(r'add_argument\((?:\s*"-\w",)?\s*"--(\w+)"', text)
    return frozenset({*names, "accelerate_config"} - {"help"})


def as_words(name: str, value: Any) -> list[str]:
    """A setting of a file as words for the launcher."""
    if launch_parser()._option_string_actions[f"--{name}"].nargs == 0:  # a switch
        return [f"--{name}"] if value else []
    return [f"--{name}", str(value)]


def launch_arguments(words: Sequence[str], program: Sequence[str]) -> argparse.Namespace:
    """What accelerate's parser reads from words, for a program and its words.

    Raises:
        UsageError: values that it does not take.
    """
    arguments = launch_parser().parse_args([*words, "--module", *program])
    if arguments.training_script != program[0]:  # a word behind a switch
        raise UsageError(f"`{arguments.training_script}` belongs to no flag.")
    return arguments


# ---------------------------------------------------------------------- files by name


def shipped() -> dict[str, Path]:
    """Files for accelerate by name: TRL's that we can train with, and ours, which go before."""
    upstream = importlib.util.find_spec("trl")
    packages = [upstream.origin, __file__] if upstream else [__file__]
    folders = [Path(str(file)).parent / "accelerate_configs" for file in packages]
    found = {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}
    return {name: path for name, path in found.items() if name not in REFUSED}


def config_file(name: str) -> str:
    """The file that `--accelerate_config` names.

    Raises:
        argparse.ArgumentTypeError: there is none.
    """
    known = shipped()
    if Path(name).is_file() or name in known:
        return name if Path(name).is_file() else str(known[name])
    raise argparse.ArgumentTypeError(
        f"`{name}` is no file, and no name of one. {did_you_mean(Path(name).stem, known) or ''} Known are "
        f"{', '.join(known)}"
    )


# -------------------------------------------------------------------------- launching


def starts_one() -> bool:
    """Whether accelerate, told nothing, would start one process and change nothing about it."""
    if told():
        return True
    import torch
    from accelerate.commands.config.config_args import default_config_file

    return torch.accelerator.device_count() <= 1 and not os.path.isfile(default_config_file)


def launched(words: Sequence[str], program: Sequence[str]) -> int:
    """Let accelerate start the processes; the exit code, of the first that failed."""
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = launch_arguments(words, [LAUNCHED, *program])
    try:
        with forwarded_signals():
            launch_command(arguments)
    except subprocess.CalledProcessError as error:
        return exit_code(error.returncode)
    except ChildFailedError as error:
        return exit_code(error.get_first_failure()[1].exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def exit_code(status: int) -> int:
    """A shell's exit code for the status of a child, which is negative where a signal ended it."""
    return 128 - status if status < 0 else status


@contextmanager
def forwarded_signals() -> Iterator[None]:
    """Send SIGTERM on to the processes that are waited for; Ctrl-C reaches them from the terminal."""
    import psutil

    def forward(number: int, frame: Any) -> None:
        for child in psutil.Process().children():
            child.send_signal(number)

    handlers: Mapping[int, Any] = {signal.SIGTERM: forward, signal.SIGINT: lambda *given: None}
    kept = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
