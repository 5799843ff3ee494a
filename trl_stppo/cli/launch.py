"""`trl-stppo train` and `evaluate` through accelerate's launcher, as TRL's own commands go.

Words that are no flags of the command are the launcher's. Where they say nothing and accelerate would
start one process, that is this one: nothing is imported twice, and signals arrive where they are meant.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .agents import others_keys
from .early import wants_dry_run
from .flags import FlagParser, flag_name, groups, refuse, strange_keys, with_config
from .usage import UsageError, closest, named

CONFIG = "accelerate_config"
REFUSED = ("fsdp1",)  # TRL ships it; FSDP1 is not supported (docs/distributed.md)
LAUNCHED = "trl_stppo.cli.launched"
# What a launcher tells its processes.
TOLD = ("LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION")


def run(
    command: str, types: Sequence[type], here: Callable[[list[str]], int], words: Sequence[str]
) -> int:
    """Run a command in as many processes as its words ask for; the exit code.

    Args:
        command: its name.
        types: dataclasses of its flags.
        here: runs it in this process.
        words: flags of the command and of the launcher.
    """
    own, asked, filed = divided(types, words)
    if any(name in os.environ for name in TOLD):
        if asked:
            raise UsageError(
                f"`{' '.join(asked)}`: this process has been started by a launcher already. Give it to that "
                f"one, or leave that one out."
            )
        return here(own)
    launch_words = with_file([*filed, *asked])
    if wants_dry_run(own):
        from .dry_run import dry_run

        return dry_run(own, launch_words)
    if not launch_words and starts_one():
        return here(own)
    return launched(launch_words, [command, *own])


def divided(types: Sequence[type], words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """The command's words; the launcher's on the command line, and those in the YAML file."""
    flags, path, settings = with_config(words)
    parser, known = FlagParser(types), launch_flags()
    unknown = parser.parse_known_args(flags)[1]
    strange = strange_keys(parser, settings)
    wrong = [
        [*([] if flag is None else [flag]), *values]
        for flag, values in groups(unknown)
        if flag is None or flag_name(flag) not in known
    ]
    odd = [key for key in strange if key not in others_keys()]
    refuse([word for group in wrong for word in group], odd, parser.names() | known, path)
    filed = [word for key in strange if key in known for word in _as_words(key, settings[key])]
    return without(words, unknown), unknown, filed


def without(words: Sequence[str], taken: Sequence[str]) -> list[str]:
    """The words less those of an ordered part of them."""
    rest, left = list(taken), []
    for word in words:
        if rest and word == rest[0]:
            rest.pop(0)
        else:
            left.append(word)
    return left


# ------------------------------------------------------------------- accelerate's flags


@functools.cache
def _actions() -> dict[str, argparse.Action]:
    from accelerate.commands.launch import launch_command_parser

    return {
        flag_name(option): action
        for action in launch_command_parser()._actions
        for option in action.option_strings
        if option.startswith("--") and option != "--help"
    }


def launch_flags() -> set[str]:
    """Flags that `train` and `evaluate` hand to the launcher, without dashes."""
    return {*_actions(), CONFIG}


def _as_words(name: str, value: Any) -> list[str]:
    """A setting of a file as words."""
    if name != CONFIG and _actions()[name].nargs == 0:  # a switch
        return [f"--{name}"] if value else []
    return [f"--{name}", str(value)]


def launch_arguments(words: Sequence[str], program: Sequence[str]) -> argparse.Namespace:
    """What accelerate's parser reads from words, for a program and its words.

    Raises:
        UsageError: values that it does not take.
    """
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    parser.error = _refuse
    return parser.parse_args([*words, "--module", *program])


def _refuse(message: str) -> None:
    raise UsageError(f"accelerate launch: {message}.")


def launch_settings(words: Sequence[str]) -> dict[str, Any]:
    """The settings that words for the launcher give, by their names."""
    arguments = launch_arguments(words, [LAUNCHED])
    given = [flag_name(flag) for flag, _ in groups(words) if flag is not None]
    return {name: getattr(arguments, name) for name in given}


# ---------------------------------------------------------------------- files by name


def shipped() -> dict[str, Path]:
    """Files for accelerate by name: TRL's that we can train with, and ours, which go before."""
    upstream = importlib.util.find_spec("trl")
    packages = [upstream.origin, __file__] if upstream else [__file__]
    folders = [Path(str(file)).parent / "accelerate_configs" for file in packages]
    found = {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}
    return {name: path for name, path in found.items() if name not in REFUSED}


def with_file(words: Sequence[str]) -> list[str]:
    """Launcher's words where `--accelerate_config NAME` has become `--config_file PATH`."""
    result: list[str] = []
    for flag, values in groups(words):
        if flag is None or flag_name(flag) != CONFIG:
            result += [*([] if flag is None else [flag]), *values]
            continue
        name = "".join([flag.partition("=")[2], *values[:1]])
        result += ["--config_file", str(config_file(name))]
    return result


def config_file(name: str) -> Path:
    """The file that `--accelerate_config` names.

    Raises:
        UsageError: there is none.
    """
    if name and Path(name).is_file():
        return Path(name)
    known = shipped()
    if name in known:
        return known[name]
    similar = closest(Path(name).stem, known)
    proposal = f" Did you mean {named(similar)}?" if similar else ""
    raise UsageError(
        f"`--accelerate_config {name}` is no file, and no name of one: those are {', '.join(known)}."
        + proposal
    )


# -------------------------------------------------------------------------- launching


def starts_one() -> bool:
    """Whether accelerate, told nothing, would start one process and change nothing about it."""
    import torch
    from accelerate.commands.config.config_args import default_config_file

    return torch.accelerator.device_count() <= 1 and not os.path.isfile(default_config_file)


def launched(words: Sequence[str], program: Sequence[str]) -> int:
    """Let accelerate start the processes; the exit code, of the first that failed.

    Args:
        words: for the launcher.
        program: a command and its words.
    """
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
