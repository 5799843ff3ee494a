"""The console script: runs a command and turns its errors into messages and exit codes.

Exit codes: 0 success, 1 failure, 2 wrong usage, 128 + n signal n.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from ..version import __version__
from .usage import Parser, UsageError

PROGRAM = "trl-stppo"
# Command -> its module. The module's docstring is the help.
MODULES = {
    "new": "cli.new",
    "train": "cli.train",
    "evaluate": "cli.evaluate",
    "env check": "cli.env_check",
    "watch": "cli.watch",
    "trace": "trace.page",
    "plot": "watch.plot",
}
# These commands have TRL's flags and `run(words)`; others have `add_arguments(parser)` and `run(options)`.
TRAINERS = ("train", "evaluate")
DEBUG = "TRL_STPPO_DEBUG"
FIRST_STEPS = """\
first steps:
  trl-stppo new my_agent                 # a folder with an agent to change
  trl-stppo env check my_env:MyEnv       # is my environment sound?
  trl-stppo train --config run.yaml --dry_run
  trl-stppo train --config run.yaml

trl-stppo COMMAND --help explains a command."""
# Errors of these types need no traceback if a `raise` statement in one of these packages raised them.
READABLE = (ValueError, TypeError, RuntimeError, OSError, ImportError)
PACKAGES = {
    *("trl_stppo", "trl", "transformers", "huggingface_hub", "datasets", "tokenizers", "peft"),
    "matplotlib",
}


def main(words: Sequence[str] | None = None) -> int:
    """Run a command line (default: `sys.argv`) and return its exit code."""
    words = list(sys.argv[1:] if words is None else words)
    # Text of an environment may have characters that the console lacks.
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    return guarded(lambda: _dispatch(words))


def _dispatch(words: list[str]) -> int:
    command = " ".join(words[: 2 if words[:1] == ["env"] else 1])
    words = words[len(command.split()) :]
    if command in ("-V", "--version"):
        print(f"{PROGRAM} {__version__}")
    elif command in ("", "env", "env -h", "env --help", "help", "-h", "--help"):
        print(f"usage: {PROGRAM} COMMAND [--flag VALUE ...]\n\ncommands:")
        print(*(f"  {name:<10} {documented(name)[0]}" for name in MODULES), sep="\n")
        print(f"\n--version shows the version.\n\n{FIRST_STEPS}")
    elif command not in MODULES:
        raise UsageError(f"`{command}` is no command; allowed are {', '.join(MODULES)}.")
    elif command not in TRAINERS:
        return _run_parsed(command, words)
    else:
        return _run(command, words)
    return 0


def documented(command: str) -> tuple[str, str, str]:
    """Read a command's summary, description and examples from its module's file, without an import."""
    path = Path(__file__).parents[1].joinpath(*MODULES[command].split("."))
    text = ast.get_docstring(ast.parse(path.with_suffix(".py").read_text())) or ""
    about, _, examples = text.partition("\n\nExamples:\n")
    return about.partition("\n")[0], about, f"examples:\n{examples}"


def _run(command: str, words: list[str]) -> int:
    from .flags import FlagParser, early, types_of

    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    if {"-h", "--help"} & set(words):
        _, about, examples = documented(command)
        usage = f"{PROGRAM} {command} [--config FILE] [--flag VALUE ...]"
        texts = {"usage": usage, "description": about, "epilog": examples}
        FlagParser(types_of(command), **texts).print_help()
        return 0
    dry = command == "train" and early(words).dry_run
    if dry:
        # Set the variable now, because the libraries read it when they are imported.
        os.environ["HF_HUB_OFFLINE"] = "1"
    elif command == "train" and os.environ.get("RANK", "0") == "0":
        print("loading libraries, model and data ...", file=sys.stderr, flush=True)
    run = importlib.import_module("trl_stppo." + ("cli.dry_run" if dry else MODULES[command])).run
    return int(run(words))


def _run_parsed(command: str, words: Sequence[str]) -> int:
    """Run a command whose module has `add_arguments`: parse the words, then call the module's `run`."""
    module = importlib.import_module(f"trl_stppo.{MODULES[command]}")
    _, about, examples = documented(command)
    parser = Parser(prog=f"{PROGRAM} {command}", description=about, epilog=examples)
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(words)) or 0)


def guarded(call: Callable[[], int]) -> int:
    """Call a command and return its exit code. Print an error as one line or as a traceback."""
    debug = os.environ.get(DEBUG, "").lower() not in ("", "0", "false", "no")
    try:
        return call()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            _print_error(ended.code)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:
        _print_error(traceback.format_exc().rstrip() if debug else f"{PROGRAM}: interrupted")
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reading end of the pipe is closed (as by `| head`), so drop the rest of the buffer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        readable = not debug and is_readable(error)
        short = f"{PROGRAM}: error: {error}\n{DEBUG}=1 shows where."
        _print_error(short if readable else traceback.format_exc().rstrip())
        return 2 if isinstance(error, UsageError) else 1


def is_readable(error: BaseException) -> bool:
    """Return whether an error can be read without a traceback: `PACKAGES` raised it on purpose.

    A ValueError of an environment or of torch needs its traceback.
    """
    if isinstance(error, UsageError):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))[-1:]
    if not frames or not isinstance(error, READABLE):
        return False
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    on_purpose = isinstance(error, OSError) or line.startswith("raise")
    return on_purpose and frames[0][0].f_globals.get("__name__", "").partition(".")[0] in PACKAGES


def _print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
