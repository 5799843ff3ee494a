"""`trl-stppo train` and `evaluate` through accelerate's launcher, as TRL's own commands go.

Words that are no flags of the command are the launcher's. If there are none and accelerate would start one
process, that is this one.
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
# What a launcher tells its processes.
TOLD = ("LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION")
HIDDEN = (*TOLD, "RANK", "MASTER_ADDR", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP")


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
    return parser


def launch_flags() -> set[str]:
    """Flags that are handed to the launcher, without dashes."""
    options = launch_parser()._option_string_actions
    return {name[2:] for name in options if name.startswith("--")} - {"help"}


def as_words(settings: Mapping[str, Any]) -> list[str]:
    """Settings of a file as words for the launcher."""
    words = []
    for name, value in settings.items():
        if launch_parser()._option_string_actions[f"--{name}"].nargs != 0:
            words += [f"--{name}", str(value)]
        elif value:  # a switch
            words.append(f"--{name}")
    return words


def launch_arguments(words: Sequence[str], program: Sequence[str] = ()) -> argparse.Namespace:
    """What accelerate reads from words, for a command of ours and its words."""
    arguments = launch_parser().parse_args([*words, "--module", "trl_stppo", *program])
    if arguments.training_script != "trl_stppo":  # a word behind a switch
        raise UsageError(f"`{arguments.training_script}` belongs to no flag.")
    return arguments


def shipped() -> dict[str, Path]:
    """Files for accelerate by name: TRL's that we can train with, and ours, which go before."""
    upstream = importlib.util.find_spec("trl")
    packages = [upstream.origin, __file__] if upstream else [__file__]
    folders = [Path(str(file)).parent / "accelerate_configs" for file in packages]
    found = {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}
    return {name: path for name, path in found.items() if name not in REFUSED}


def config_file(name: str) -> str:
    """The file that `--accelerate_config` names."""
    known = shipped()
    if Path(name).is_file():
        return name
    if name not in known:
        raise argparse.ArgumentTypeError(f"`{name}` is no file, and none of {', '.join(known)}.")
    return str(known[name])


# ------------------------------------------------------------- launches that are only planned


@dataclass(frozen=True)
class Launch:
    """How accelerate would start the run.

    Attributes:
        engine: "none", "DDP", "ZeRO-0" to "ZeRO-3", "FSDP1" or "FSDP2".
        processes: number of them.
        mixed_precision: "no", "bf16", "fp16" or "fp8".
    """

    engine: str = "none"
    processes: int = 1
    mixed_precision: str = "no"


def planned_launch(words: Sequence[str]) -> Launch:
    """The launch that accelerate reads from words; nothing is started."""
    if not words:
        return Launch(processes=int(os.environ.get("WORLD_SIZE", 1)))
    from accelerate.commands.launch import _validate_launch_command

    given = _validate_launch_command(launch_arguments(words))[0]
    engine, number = "none", given.num_processes or 1
    if given.use_deepspeed:
        file = given.deepspeed_config_file
        own = json.loads(Path(file).read_text()).get("zero_optimization", {}) if file else {}
        engine = f"ZeRO-{own.get('stage', 2 if given.zero_stage is None else given.zero_stage)}"
    elif given.use_fsdp:
        engine = f"FSDP{given.fsdp_version}"
    elif given.multi_gpu or number > 1:
        engine = "DDP"
    return Launch(engine, number, str(given.mixed_precision or "no").lower())


@contextmanager
def launched_as(launch: Launch) -> Iterator[None]:
    """Let configurations believe that they were launched so, and by no launcher that waits for others."""
    from transformers import TrainingArguments

    size = property(lambda self: launch.processes)
    with patch.object(TrainingArguments, "world_size", size), patch.dict(os.environ):
        for name in HIDDEN:
            os.environ.pop(name, None)
        os.environ["ACCELERATE_MIXED_PRECISION"] = launch.mixed_precision
        yield


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

    arguments = launch_arguments(words, program)
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
