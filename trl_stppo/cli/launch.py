"""Launch `trl-stppo train` and `evaluate` with accelerate, as TRL launches its commands.

Flags that the command does not have go to the launcher. Without any, a single process runs here.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from .usage import UsageError

REFUSED = ("fsdp1",)  # TRL ships it; FSDP1 is not supported (docs/many_gpus.md)
# Variables that a launcher sets for its processes.
LAUNCHED = ("LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION")
HIDDEN = (*LAUNCHED, "RANK", "MASTER_ADDR", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP")


def is_launched() -> bool:
    """Return whether a launcher has started this process."""
    return any(name in os.environ for name in LAUNCHED)


# ------------------------------------------------------------------- accelerate's flags


@functools.cache
def launch_parser() -> argparse.ArgumentParser:
    """Return the parser of `accelerate launch`, extended by the flag `--accelerate_config`."""
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    parser.add_argument("--accelerate_config", dest="config_file", type=config_file)
    return parser


def launch_flags() -> set[str]:
    """Return the names of all flags of `accelerate launch`, without dashes."""
    options = launch_parser()._option_string_actions
    return {name[2:] for name in options if name.startswith("--")} - {"help"}


def as_words(settings: Mapping[str, Any]) -> list[str]:
    """Convert launcher settings of a YAML file to command-line flags."""
    words = []
    for name, value in settings.items():
        if launch_parser()._option_string_actions[f"--{name}"].nargs != 0:
            words += [f"--{name}", str(value)]
        elif value:  # a switch
            words.append(f"--{name}")
    return words


def launch_arguments(words: Sequence[str], program: Sequence[str] = ()) -> argparse.Namespace:
    """Parse the launcher's flags for a launch of `program`, a command with its flags."""
    arguments = launch_parser().parse_args([*words, "--module", "trl_stppo", *program])
    if arguments.training_script != "trl_stppo":  # a word behind a switch
        raise UsageError(f"`{arguments.training_script}` belongs to no flag.")
    return arguments


def shipped() -> dict[str, Path]:
    """Return accelerate's shipped files by name: TRL's supported files, overridden by this package's."""
    upstream = importlib.util.find_spec("trl")
    packages = [upstream.origin, __file__] if upstream else [__file__]
    folders = [Path(str(file)).parent / "accelerate_configs" for file in packages]
    found = {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}
    return {name: path for name, path in found.items() if name not in REFUSED}


def config_file(name: str) -> str:
    """Resolve `--accelerate_config`, a path or the name of a shipped file, to a path."""
    known = shipped()
    if Path(name).is_file():
        return name
    if name not in known:
        raise argparse.ArgumentTypeError(f"`{name}` is no file, and none of {', '.join(known)}.")
    return str(known[name])


# ------------------------------------------------------------- launches that are only planned


@dataclass(frozen=True)
class Launch:
    """Settings of a launch by accelerate: engine, number of processes, mixed precision."""

    engine: str = "none"  # or "DDP", "ZeRO-0" to "ZeRO-3", "FSDP1", "FSDP2"
    processes: int = 1
    mixed_precision: str = "no"  # or "bf16", "fp16", "fp8"


def planned_launch(words: Sequence[str]) -> Launch:
    """Parse the launcher's flags into a `Launch`, without starting a process."""
    if not words:
        return Launch(processes=int(os.environ.get("WORLD_SIZE", 1)))
    from accelerate.commands.launch import _validate_launch_command

    parsed = _validate_launch_command(launch_arguments(words))[0]
    engine, number = "none", parsed.num_processes or 1
    if parsed.use_deepspeed:
        file = parsed.deepspeed_config_file
        zero = json.loads(Path(file).read_text()).get("zero_optimization", {}) if file else {}
        engine = f"ZeRO-{zero.get('stage', 2 if parsed.zero_stage is None else parsed.zero_stage)}"
    elif parsed.use_fsdp:
        engine = f"FSDP{parsed.fsdp_version}"
    elif parsed.multi_gpu or number > 1:
        engine = "DDP"
    return Launch(engine, number, str(parsed.mixed_precision or "no").lower())


@contextmanager
def launched_as(launch: Launch) -> Iterator[None]:
    """Context manager in which configurations use a planned launch instead of the process's own."""
    from transformers import TrainingArguments

    size = property(lambda self: launch.processes)
    with patch.object(TrainingArguments, "world_size", size), patch.dict(os.environ):
        for name in HIDDEN:
            os.environ.pop(name, None)
        os.environ["ACCELERATE_MIXED_PRECISION"] = launch.mixed_precision
        yield


# -------------------------------------------------------------------------- launching


def starts_one() -> bool:
    """Return whether `accelerate launch` without flags would start one process with default settings."""
    import torch
    from accelerate.commands.config.config_args import default_config_file

    return torch.accelerator.device_count() <= 1 and not os.path.isfile(default_config_file)


def launched(words: Sequence[str], program: Sequence[str]) -> int:
    """Start the processes with accelerate; return 0, or the exit code of the first failed process."""
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = launch_arguments(words, program)
    try:
        with forwarded_signals():
            launch_command(arguments)
    except subprocess.CalledProcessError as error:
        return _exit_code(error.returncode)
    except ChildFailedError as error:
        return _exit_code(error.get_first_failure()[1].exitcode)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _exit_code(status: int) -> int:
    """Return a shell's exit code for a child's status: 128 + n if signal n ended the child."""
    return 128 - status if status < 0 else status


@contextmanager
def forwarded_signals() -> Iterator[None]:
    """Context manager that forwards SIGTERM to the child processes. Ctrl-C reaches them from the terminal."""
    import psutil

    def forward(number: int, frame: Any) -> None:
        for child in psutil.Process().children():
            child.send_signal(number)

    handlers: Mapping[int, Any] = {signal.SIGTERM: forward, signal.SIGINT: lambda *_: None}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
