"""Finds the command, runs it, and turns what it raises into messages and exit codes.

0 success, 1 failure, 2 words that make no sense, 128 + n signal n.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import importlib
import os
import shutil
import signal
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..redaction import redacted
from .usage import Parser, UsageError, names_of, refuse

PROGRAM = "trl-stppo"
# Command -> its module in the package, whose docstring is the help, with `run(words)`.
MODULES = {
    "train": "cli.train",
    "evaluate": "cli.evaluate",
    "estimate": "cli.estimate",
    "doctor": "cli.doctor",
    "show": "cli.show",
    "env check": "cli.env_check",
    "env play": "cli.play",
    "trace": "trace.command",
    "plot": "watch.plot_command",
}
# Those whose module has `add_arguments(parser)` and `run(options)` instead.
PARSED = ("doctor", "env check", "trace", "plot")
# Those that accelerate may start.
LAUNCHED = ("train", "evaluate")
DEBUG = "TRL_STPPO_DEBUG"
SHORT_HELP, WHOLE_HELP = {"-h", "--help"}, {"--help_all", "--help-all"}
FIRST_STEPS = """\
first steps:
  trl-stppo env check my_env:MyEnv       # is my environment sound?
  trl-stppo estimate --model NAME --qlora --card 24
  trl-stppo train --config run.yaml --dry_run
  trl-stppo train --config run.yaml

trl-stppo COMMAND --help explains a command."""
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
    size = 2 if words[:1] == ["env"] and not SHORT_HELP & set(words[1:2]) else 1
    command = " ".join(words[:size])
    if command in MODULES:
        return _run(command, words[size:], launches=True)
    if command in ("", "env", "help", *WHOLE_HELP):
        command = "--help"
    if _parser().parse_args([command]).version:
        print(_versions())
    return 0


def _parser() -> Parser:
    """Of what stands before a command's own words."""
    parser = Parser(
        PROGRAM,
        usage="%(prog)s COMMAND [--flag VALUE ...]",
        description="Train language-model agents over several turns with PPO, ST-PPO and others.",
        epilog=FIRST_STEPS,
    )
    parser.add_argument("-V", "--version", action="store_true", help="show versions and exit")
    parser.add_argument(
        "--debug", action="store_true", help=f"show where an error came from, as {DEBUG}=1 does"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in MODULES:
        commands.add_parser(name, help=_documented(name)[0], add_help=False)
    return parser


def _documented(command: str) -> tuple[str, str, str]:
    """Summary, description and examples from the docstring of a command's module, which is not imported."""
    path = Path(__file__).parents[1].joinpath(*MODULES[command].split("."))
    text = ast.get_docstring(ast.parse(path.with_suffix(".py").read_text())) or ""
    about, _, examples = text.partition("\n\nExamples:\n")
    width = min(100, shutil.get_terminal_size().columns - 2)
    filled = [textwrap.fill(part, width, break_on_hyphens=False) for part in about.split("\n\n")]
    return about.partition("\n")[0], "\n\n".join(filled), f"examples:\n{examples}"


def _module(command: str) -> Any:
    return importlib.import_module(f"trl_stppo.{MODULES[command]}")


def _run(command: str, words: list[str], *, launches: bool) -> int:
    asked = {*SHORT_HELP, *WHOLE_HELP} & set(words)
    if command in PARSED:
        return _run_parsed(command, ["--help"] if asked else words)
    from .early import quieten, wants_dry_run

    quieten([] if asked else words)
    if asked:
        return _explain(command, whole=not asked <= SHORT_HELP)
    from .flag_types import check_words, types_of

    check_words(command, words)  # a mistake is told before seconds of imports
    if not launches or command not in LAUNCHED:
        return _load_and_run(command, words)
    from .flags import divided
    from .launch import launched, starts_one

    own, launcher = divided(types_of(command, words, whole=False), words)
    if command == "train" and wants_dry_run(own):
        from .dry_run import dry_run

        return dry_run(own, launcher)
    if launcher or not starts_one():
        return launched(launcher, [command, *own])
    return _load_and_run(command, own)


def _load_and_run(command: str, words: list[str]) -> int:
    from .early import wants_dry_run

    if command == "train" and os.environ.get("RANK", "0") == "0" and not wants_dry_run(words):
        print("loading libraries, model and data ...", file=sys.stderr, flush=True)
    return int(_module(command).run(words))


def _explain(command: str, *, whole: bool) -> int:
    """Print the help of a command; the whole of it has the flags whose classes take seconds to import."""
    from .arguments import ARGUMENTS, TRAINERS
    from .flag_types import types_of
    from .flags import help_of

    types = types_of(command) if whole else [ARGUMENTS[command]]
    about, examples = _documented(command)[1:]
    texts = {"prog": f"{PROGRAM} {command}", "description": about, "epilog": examples}
    print(help_of(types, launched=command in TRAINERS, **texts), end="")
    return 0


def _run_parsed(command: str, words: Sequence[str]) -> int:
    """A command whose own module adds its arguments to a parser."""
    module, (_, about, examples) = _module(command), _documented(command)
    parser = Parser(f"{PROGRAM} {command}", description=about, epilog=examples)
    module.add_arguments(parser)
    options, unknown = parser.parse_known_args(words)
    refuse(unknown, names_of(parser))
    return int(module.run(options) or 0)


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
    """The call's exit code; what it raises is told behind `said`, with a traceback where that says more."""
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
    commands = dict.fromkeys(" ".join(words[:size]) for size in (1, 2))
    return " ".join([PROGRAM, *(name for name in commands if name in MODULES)])


def _tell(text: str) -> None:
    print(redacted(text), file=sys.stderr, flush=True)
