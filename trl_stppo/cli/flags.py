"""The flags of `train` and `evaluate`, and how they and YAML files are parsed: by TRL's parser, strictly."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

from ..trainer.options import IGNORED, option, without_ignored
from .usage import Parser, UsageError, hint

# The parser reads these texts as True, in upper or lower case.
TRUE = ("yes", "true", "t", "y", "1")
CONFIGS = Path(__file__).parent / "accelerate_configs"


@dataclass
class AgentArguments(DatasetMixtureConfig, ScriptArguments):
    """Flags of an agent's task and its evaluation."""

    dataset_name: str | None = option(
        None,
        "A file or folder of rows (.jsonl, .json, .csv, .parquet), a Hub id, or a name that "
        "the environment knows; default the environment's own rows.",
    )
    environment: str | None = option(
        None,
        "module:factory of an environment, with tools or text; default (or 'none') plain prompts.",
    )
    environment_kwargs: str | None = option(None, "JSON object of arguments for the factory.")
    agent: str | None = option(
        None, "module:function of an agent, `(client, row)`, in place of an environment."
    )
    reward_model_name_or_path: str | None = option(
        None, "A sequence-classification model as reward, in front of the reward functions."
    )
    reward_funcs: list[str] | None = option(
        None, "Reward functions: names that `trl grpo` knows, module:function or module.function."
    )
    eval_episodes: int = option(
        0,
        "Held-out rows to evaluate on, before and after; 0 for none. eval_generation_kwargs "
        "holds settings of their sampling.",
    )
    eval_environment: str | None = option(None, "module:factory of evaluation; default training's.")
    eval_environment_kwargs: str | None = option(None, "JSON object of arguments for that factory.")

    def __post_init__(self) -> None:
        if isinstance(self.reward_funcs, str):
            self.reward_funcs = [self.reward_funcs]
        try:
            super().__post_init__()
            if not all(hasattr(part, "path") for part in self.datasets):
                raise TypeError(repr(self.datasets))
        except TypeError as error:
            raise UsageError(f"`datasets`: {error}. It is a list of `path: NAME`.") from error

    @property
    def row_sources(self) -> list[str]:
        """Return the sources of the rows: names of data sets, files, folders."""
        return [part.path for part in self.datasets] or [str(self.dataset_name)]

    @property
    def rows_name(self) -> str:
        """Return the short name of the data set for printed lines and tables."""
        return "+".join(Path(name).name for name in self.row_sources)


@dataclass
class TrainArguments(AgentArguments):
    """Flags of `train`: the flags of the task, the critic's checkpoint, and `dry_run`."""

    value_model_name_or_path: str | None = option(
        None, "Checkpoint of a separate critic, instead of the shared one."
    )
    dry_run: bool = option(False, "Check everything but the weights, show the plan, and stop.")


@dataclass
class EvaluateArguments(AgentArguments):
    """Flags of `evaluate`. The help text in `cli.evaluate` explains each flag."""

    models: list[str] | None = None
    labels: list[str] | None = None
    output: str | None = None
    max_rows: int | None = None
    show: int = 0


class FlagParser(Parser, TrlParser):
    """TRL's parser, without abbreviated flags."""


def with_config(words: Sequence[str]) -> tuple[list[str], str | None, dict[str, Any]]:
    """Split off `--config`; return the other words, the path of the file or None, and its settings."""
    parser = Parser(add_help=False)
    parser.add_argument("--config", action="append", default=[])
    found, flags = parser.parse_known_args(words)
    if len(found.config) > 1:
        raise UsageError("`--config` is set twice; must be one file.")
    if not found.config:
        return flags, None, {}
    return flags, found.config[0], settings_in(found.config[0])


def settings_in(path: str) -> dict[str, Any]:
    """Read the settings of a YAML file."""
    try:
        text = Path(path).read_text()
        _check_nodes(yaml.compose(text), path)
        settings = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"`--config {path}` is no YAML: {error}") from error
    except OSError as error:
        raise UsageError(f"`--config {path}` cannot be read: {error.strerror}.") from error
    if not isinstance(settings, dict):
        raise UsageError(f"`--config {path}` holds no settings, as in `max_turns: 4`.")
    return {str(key): value for key, value in settings.items()}


def _check_nodes(node: Any, path: str) -> None:
    """Reject YAML with dates, numbers in base 60 (1:30) or repeated keys."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_nodes(item, path)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.value in lines:
            raise UsageError(f"{path}: `{key.value}` is in lines {lines[key.value]} and {line}.")
        lines[str(key.value)] = line
        kind = value.tag.rpartition(":")[2]
        if kind == "timestamp" or (kind in ("int", "float") and ":" in value.value):
            raise UsageError(
                f"{path}, line {line}: `{key.value}: {value.value}` is no text in YAML; put it in quotes."
            )
        _check_nodes(value, path)


def given(words: Sequence[str], *names: str) -> dict[str, Any]:
    """Read flags before the full parse; return those that the command line or the YAML file sets."""
    flags, _, settings = with_config(words)
    parser = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    for name in names:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="?", const=True)
    in_file = {name: settings[name] for name in names if name in settings}
    return in_file | vars(parser.parse_known_args(flags)[0])


def wants_dry_run(words: Sequence[str]) -> bool:
    """Return whether the command line, or else the YAML file, sets `dry_run`."""
    return str(given(words, "dry_run").get("dry_run")).lower() in TRUE


def configs() -> dict[type, Mapping[str, Any]]:
    """Return the trainers' configuration classes, each with its variants."""
    from ..trainer.stgrpo_config import GROUP_VARIANTS, STGRPOConfig
    from ..trainer.stppo_config import VARIANTS, STPPOConfig

    return {STPPOConfig: VARIANTS, STGRPOConfig: GROUP_VARIANTS}


def flag_types(arguments: type, words: Sequence[str]) -> tuple[type, type, type]:
    """Return the flag dataclasses of task, trainer and model. `--variant` selects the trainer's class."""
    variant = given(words, "variant").get("variant", "st-ppo")
    for config, known in configs().items():
        if variant is None or variant in known:
            return arguments, config, ModelConfig
    allowed = "; without a critic ".join(", ".join(known) for known in configs().values())
    raise UsageError(f"`variant={variant!r}`: allowed are {allowed}.")


def types_of(command: str) -> list[type]:
    """Return the dataclasses of a command's flags."""
    return list(flag_types(EvaluateArguments if command == "evaluate" else TrainArguments, ()))


def check_words(types: Sequence[type], words: Sequence[str]) -> None:
    """Reject flags and keys of the YAML file that no dataclass has."""
    flags, path, settings = with_config(words)
    parser = FlagParser(types, add_help=False)
    known = {action.dest for action in parser._actions}
    parser.set_defaults_with_config(**settings)
    rest = parser.parse_known_args(flags)[1]
    if rest and not rest[0].startswith("-"):
        raise UsageError(f"`{rest[0]}` belongs to no flag.")
    # Allow keys of other commands, because one file may serve several commands.
    keys = [key for key in settings if key not in known | {"env", *IGNORED, *_fields_of_commands()}]
    theirs = launcher_flags() if rest or keys else {}
    for word in rest:
        name = word.lstrip("-").partition("=")[0].replace("-", "_")
        if word.startswith("--") and name not in theirs:
            raise UsageError(f"`{word}` is not known. {hint(name, known | set(theirs))}")
    for key in keys:
        if key not in theirs:
            raise UsageError(f"`{key}` in {path} is not known. {hint(key, known | set(theirs))}")
    if rest or keys:
        launcher = []
        for key in keys:
            if theirs[key]:
                launcher += [f"--{key}", str(settings[key])]
            elif settings[key]:
                launcher.append(f"--{key}")
        launcher += rest
        where = f", and `{'`, `'.join(keys)}` must not be in {path}" if keys else ""
        raise UsageError(
            f"`{shlex.join(launcher)}` is for accelerate, which starts the processes{where}. "
            f"Run:\n  {accelerate_line(types, _without(words, rest), launcher)}"
        )


def launcher_flags() -> dict[str, bool]:
    """Return the flags of `accelerate launch` and `accelerate_config`: name -> whether a value follows."""
    from accelerate.commands.launch import launch_command_parser

    options = launch_command_parser()._option_string_actions
    found = {name[2:]: kind.nargs != 0 for name, kind in options.items() if name.startswith("--")}
    return {**found, "accelerate_config": True}


def accelerate_line(
    types: Sequence[type], words: Sequence[str], launcher: Sequence[str] = ()
) -> str:
    """Return the command line with which accelerate starts a command with these words."""

    def config_file(flag: re.Match[str]) -> str:
        shipped = CONFIGS / f"{flag[1]}.yaml"
        return f"--config_file {shipped if shipped.is_file() else flag[1]}"

    command = "evaluate" if EvaluateArguments in types else "train"
    line = shlex.join(["accelerate", "launch", *launcher, "-m", "trl_stppo", command, *words])
    # `--accelerate_config` is TRL's flag: a path, or the name of a shipped file.
    return re.sub(r"--accelerate_config[= ](\S+)", config_file, line)


def _fields_of_commands() -> Iterator[str]:
    for kind in (TrainArguments, EvaluateArguments, ModelConfig, *configs()):
        yield from (spec.name for spec in fields(kind))


def _without(words: Sequence[str], taken: Sequence[str]) -> list[str]:
    """Return `words` with the subsequence `taken` removed."""
    rest, left = list(taken), []
    for word in words:
        if rest and word == rest[0]:
            rest.pop(0)
        else:
            left.append(word)
    return left


def read_flags(types: Sequence[type], words: Sequence[str]) -> list[Any]:
    """Parse flags and their YAML file into dataclass instances. Flags override the file."""
    check_words(types, words)
    flags, path, settings = with_config(words)
    # Warn of settings that only TRL's PPO has.
    without_ignored(settings)
    parsed_words = flags if path is None else ["--config", path, *flags]
    try:
        parser = FlagParser(types, add_help=False)
        found = parser.parse_args_and_config(parsed_words, return_remaining_strings=True)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return [_with_home(part) for part in found[: len(types)]]


def _with_home(value: Any) -> Any:
    """Expand a leading `~/` in a text, and in the texts of lists and dataclasses."""
    if is_dataclass(value) and not isinstance(value, type):
        vars(value).update({name: _with_home(part) for name, part in vars(value).items()})
    if isinstance(value, list):
        return [_with_home(part) for part in value]
    return os.path.expanduser(value) if str(value).startswith("~/") else value
