"""The commands of shell blocks, and the flags that each of them takes."""

import argparse
import configparser
import contextlib
import dataclasses
import importlib
import io
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from unittest import mock

import trl

from tests.kit.docs_kit import ROOT

# Scripts that are commands under another name.
SHIMS = {"scripts/train_stppo.py": "train", "scripts/evaluate.py": "evaluate"}
FLAG = re.compile(r"--[A-Za-z]\w*(?:-\w+)*")
# Commands of others, whose flags are not ours to check.
OTHERS = {"cd", "source", "export", "hf", "py-spy", "tensorboard", "trackio", "cat", "python3"}
OTHERS |= {"git", "kill", "mkdir"}


def commands(code: str) -> Iterator[list[str]]:
    """The simple commands of a shell block, as words; loops and assignments are taken off."""
    joined = re.sub(r"\\\n\s*", " ", code)
    for line in joined.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|"):
                yield from [simple] if (simple := _simple(words)) else []
                words = []
            else:
                words.append(word)


def _simple(words: list[str]) -> list[str]:
    if words[:1] in (["for"], ["done"], ["#"]):
        return []
    while words and (words[0] in ("do", "then", "...", "$") or re.match(r"[A-Z_]+=", words[0])):
        words = words[1:]
    return words


def given_flags(words: list[str]) -> set[str]:
    """`--name` of each flag, values left out."""
    return {word.partition("=")[0] for word in words if FLAG.match(word)}


def check(words: list[str]) -> None:
    """Fail unless the command exists, with these flags and files."""
    name, rest = words[0], words[1:]
    if name in OTHERS:
        return
    if name == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        named = [word for word in rest if "=" not in word]
        assert set(named) <= set(targets), words
    elif name == "pip":
        for extra in re.findall(r"(?:trl-stppo|\.)\[([\w,-]+)\]", " ".join(rest)):
            assert set(extra.split(",")) <= extras(), words
    elif name == "accelerate":
        at = next(i for i, w in enumerate(rest) if w.startswith("scripts/") or w == "-m")
        assert given_flags(rest[1:at]) <= launcher_flags(), words
        _files(rest[:at])
        if rest[at : at + 2] == ["-m", "trl_stppo"]:
            _command(rest[at + 2 :])
        else:
            _script(rest[at:])
    elif name == "trl-stppo":
        _command(rest)
    elif name == "python" and rest[:2] == ["-m", "trl_stppo"]:
        _command(rest[2:])
    elif name == "python" and rest[0] == "-m":
        assert rest[1] in ("pytest", "sphinx", "build", "pip"), words
        _files(rest)
    elif name == "python" and rest[0].startswith("llama.cpp/"):
        pass
    elif name == "python" or name.startswith("scripts/"):
        _script(rest if name == "python" else words)
    elif name == "trl" and rest[0] == "sft":
        parts = (trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig)
        known = {f"--{field.name}" for part in parts for field in dataclasses.fields(part)}
        assert given_flags(rest) <= known, words
    elif name == "trl":
        assert rest[0] in ("vllm-serve",), words
    elif name in ("pytest", "bash"):
        _files(rest)
    elif name not in ("vllm", "llama-server"):
        raise AssertionError(f"a command that the test does not know: {words}")


def _command(rest: list[str]) -> None:
    if rest[:1] in (["--version"], ["-h"], ["--help"]):
        return
    name = " ".join(rest[:2]) if rest[0] == "env" else rest[0]
    known = flags_of_command(name) | {"--help"}
    assert given_flags(rest) <= known, (rest, given_flags(rest) - known)
    _files(rest)


def _script(rest: list[str]) -> None:
    script = rest[0]
    if not script.startswith(("scripts/", "benchmarks/")):
        return
    assert (ROOT / script).is_file(), rest
    if script in SHIMS:
        known = flags_of_command(SHIMS[script])
    else:
        known = flags_of_script(script)
    if script == "scripts/verifier/best_of.py":
        known |= flags_of_command("evaluate")
    assert given_flags(rest) <= known, (rest, given_flags(rest) - known)
    _files(rest)


def _files(words: list[str]) -> None:
    """Files of the repository that are named have to be there."""
    for word in words:
        if word.startswith(("scripts/", "tests/", "benchmarks/")) and "$" not in word:
            assert (ROOT / word).exists(), word


@cache
def extras() -> set[str]:
    """The extras of setup.cfg."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return set(parser["options.extras_require"])


@cache
def launcher_flags() -> set[str]:
    """Flags of `accelerate launch`."""
    from accelerate.commands.launch import launch_command_parser

    return set(launch_command_parser()._option_string_actions)


def argument_classes() -> list[type]:
    """The dataclasses from which our commands read flags."""
    from trl_stppo.cli.flags import types_of
    from trl_stppo.cli.main import TRAINERS

    return [kind for command in TRAINERS for kind in types_of(command)]


@cache
def flags_of_command(name: str) -> set[str]:
    """All flags of a command of `trl-stppo`, with dashes."""
    from trl_stppo.cli.flags import types_of
    from trl_stppo.cli.main import MODULES, TRAINERS, documented

    if name not in TRAINERS:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"trl_stppo.{MODULES[name]}").add_arguments(parser)
        return set(parser._option_string_actions)
    fields = [f.name for kind in types_of(name) for f in dataclasses.fields(kind)]
    return {f"--{field}" for field in [*fields, "config"]} | {*FLAG.findall(documented(name)[1])}


@cache
def flags_of_script(script: str) -> set[str]:
    """All flags that the help of a script, with all of its sub-commands, names."""
    texts = [_help(script, [])]
    subcommands = re.search(r"\{([\w,-]+)\}", texts[0].split("\n\n")[0])
    if subcommands and not FLAG.search(texts[0].split(subcommands[0])[0].split()[-1]):
        texts += [_help(script, [name]) for name in subcommands[1].split(",")]
    return {flag for text in texts for flag in FLAG.findall(text)}


def _help(script: str, words: list[str]) -> str:
    out, path = io.StringIO(), ROOT / script
    with (
        mock.patch.object(sys, "argv", [str(path), *words, "--help"]),
        mock.patch.object(sys, "path", [str(path.parent), *sys.path]),
        contextlib.redirect_stdout(out),
        contextlib.suppress(SystemExit),
    ):
        runpy.run_path(str(path), run_name="__main__")
    return out.getvalue()
