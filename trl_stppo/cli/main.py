"""Finds the command, runs it, and turns what it raises into messages and exit codes.

0 success, 1 failure, 2 words that make no sense, 128 + n signal n.
"""

from __future__ import annotations

import contextlib
import dis
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from ..redaction import redacted
from .pages import PAGES, overview
from .usage import UsageError, closest, named

PROGRAM = "trl-stppo"
DEBUG = "TRL_STPPO_DEBUG"
# Command -> the module that runs it: `run(words)`, and `flag_types_of(words)`.
MODULES = {
    "train": "trl_stppo.cli.train",
    "evaluate": "trl_stppo.cli.evaluate",
    "estimate": "trl_stppo.cli.estimate",
    "show": "trl_stppo.cli.show",
    "env play": "trl_stppo.cli.play",
}
ENV: tuple[str, ...] = ("env check", "env play")
# Those that accelerate may start in several processes.
LAUNCHED = ("train", "evaluate")
# Command -> a module with `add_arguments(parser)` and `run(options)`.
PARSED = {
    "env check": "trl_stppo.cli.env_check",
    "trace": "trl_stppo.trace.command",
    "plot": "trl_stppo.watch.plot_command",
}
# Errors that are told in a sentence where one of these packages has raised them on purpose.
TELLING = (ValueError, TypeError, RuntimeError, OSError, ImportError)
TELLERS = {"trl_stppo", "trl", "transformers", "huggingface_hub", "datasets", "tokenizers", "peft"}


def main(words: Sequence[str] | None = None) -> int:
    """The console script; its exit code.

    Args:
        words: of the command line; default this process's.
    """
    words = list(sys.argv[1:] if words is None else words)
    debug = words[:1] == ["--debug"]
    return guarded(lambda: _dispatch(words[debug:]), _said(words[debug:]), debug=debug)


def run_here(command: str, words: Sequence[str]) -> int:
    """A command without any launching; its exit code."""
    return guarded(lambda: _run(command, list(words), launches=False), f"{PROGRAM} {command}")


# --------------------------------------------------------------------------- commands


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "--help_all", "--help-all", "help"):
        print(overview(), end="")
        return 0
    if words[0] == "--version":
        print(_versions())
        return 0
    if words[0] == "env" and words[1:2] in ([], ["-h"], ["--help"]):
        print("\n".join(page.text(name) for name, page in PAGES.items() if name in ENV), end="")
        return 0
    command, rest = _command(words)
    return _run(command, rest, launches=True)


def _command(words: Sequence[str]) -> tuple[str, list[str]]:
    """The command, and the words behind it."""
    for number in (1, 2):
        command = " ".join(words[:number])
        if command in PAGES:
            return command, list(words[number:])
    first = words[0]
    if first == "env":
        first, known = " ".join(words[:2]), ENV
    else:
        known = tuple(PAGES)
    raise UsageError(
        f"There is no command `{first}`. Did you mean {named(closest(first, known) or known)}?"
    )


def _run(command: str, words: list[str], *, launches: bool) -> int:
    whole = any(word in ("--help_all", "--help-all") for word in words)
    if not whole and any(word in ("-h", "--help") for word in words):
        print(PAGES[command].text(command), end="")
        return 0
    if command in PARSED:
        return _run_parsed(command, words)
    from .early import check_config, quieten

    check_config(words)
    quieten(words)
    module = importlib.import_module(MODULES[command])
    if whole:
        return _print_all(command, module.flag_types_of([]))
    if launches and command in LAUNCHED:
        from .launch import run

        return run(command, module.flag_types_of(words), module.run, words)
    return int(module.run(words))


def _print_all(command: str, types: Sequence[type]) -> int:
    from .all_flags import described
    from .launch import shipped

    print(PAGES[command].text(command))
    print(described(types, launcher=list(shipped()) if command in LAUNCHED else ()), end="")
    return 0


def _run_parsed(command: str, words: list[str]) -> int:
    """A command whose own module adds its arguments to a parser."""
    import argparse

    module = importlib.import_module(PARSED[command])
    parser = argparse.ArgumentParser(
        f"{PROGRAM} {command}",
        description=PAGES[command].about,
        allow_abbrev=False,
        add_help=False,
    )
    parser.error = _refuse  # type: ignore[method-assign, assignment]
    module.add_arguments(parser)
    parser.add_argument("-h", "--help", action="store_true", help="The short help.")
    parser.add_argument("--help_all", "--help-all", action="help", help="This.")
    options, unknown = parser.parse_known_args(words)
    if unknown:
        from .usage import advice

        known = {o.lstrip("-") for action in parser._actions for o in action.option_strings}
        raise UsageError(
            f"`{' '.join(unknown)}`: not known here. {advice(unknown[0].lstrip('-'), known, {})}"
        )
    return int(module.run(options) or 0)


def _refuse(message: str) -> None:
    raise UsageError(f"{message}.")


def _versions() -> str:
    """Versions of what matters; nothing is imported for it."""
    from importlib.metadata import PackageNotFoundError, version

    from ..version import __version__

    found = [f"Python {sys.version.split()[0]}"]
    for package in ("trl", "transformers", "accelerate", "peft", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return f"{PROGRAM} {__version__} ({', '.join(found)})"


# ----------------------------------------------------------------------------- errors


def guarded(call: Callable[[], int], said: str, *, debug: bool = False) -> int:
    """The call's exit code; what it raises is told, with a traceback only where that says more.

    Args:
        call: the command.
        said: program and command, before a message.
        debug: always show the traceback.
    """
    debug = debug or os.environ.get(DEBUG, "").lower() not in ("", "0", "false", "no")
    try:
        return call()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            _tell(ended.code)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        if debug:
            _tell(traceback.format_exc().rstrip())
        _tell(f"{said}: interrupted")
        return 128 + signal.SIGINT
    except BrokenPipeError:  # as by `| head`; what is left in the buffer has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        wrong = isinstance(error, UsageError)
        if debug or not is_told(error):
            _tell(traceback.format_exc().rstrip())
        else:
            _tell(f"{said}: error: {error}")
            _tell(f"{said} --help explains the flags." if wrong else f"{DEBUG}=1 shows where.")
        return 2 if wrong else 1


def is_told(error: BaseException) -> bool:
    """Whether an error was raised on purpose, with a message for people.

    A ValueError out of an environment, or of torch, is not: there the traceback is what helps.
    """
    if isinstance(error, UsageError):
        return True
    last: Any = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not isinstance(error, TELLING):
        return False
    module = str(last.tb_frame.f_globals.get("__name__"))
    instruction = last.tb_frame.f_code.co_code[last.tb_lasti]
    on_purpose = isinstance(error, OSError) or instruction == dis.opmap["RAISE_VARARGS"]
    return on_purpose and module.partition(".")[0] in TELLERS


def _said(words: Sequence[str]) -> str:
    with contextlib.suppress(UsageError, IndexError):
        return f"{PROGRAM} {_command(words)[0]}"
    return PROGRAM


def _tell(text: str) -> None:
    print(redacted(text), file=sys.stderr, flush=True)
