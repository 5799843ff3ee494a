"""Flags and YAML files of `train`, `evaluate` and `estimate`: TRL's parser, and what it would pass over."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from trl import ModelConfig, TrlParser

from ..trainer.config.names import IGNORED, without_ignored
from .arguments import ARGUMENTS, EvaluateArguments, TrainArguments
from .usage import Parser, UsageError, hint

TRUE = ("yes", "true", "t", "y", "1")  # as the parser reads them, in any case


class FlagParser(Parser, TrlParser):
    """TRL's parser, without abbreviations."""

    def __init__(self, dataclass_types: Sequence[type], **options: Any) -> None:
        super().__init__(dataclass_types, **{"add_help": False, **options})


# ------------------------------------------------------------------------- the file


def with_config(words: Sequence[str]) -> tuple[list[str], str | None, dict[str, Any]]:
    """The words without `--config`, the file that it names, and what the file holds.

    Raises:
        UsageError: the file cannot be read.
    """
    parser = Parser(add_help=False)
    parser.add_argument("--config", action="append", default=[])
    found, flags = parser.parse_known_args(words)
    if len(found.config) > 1:
        raise UsageError("`--config` is given twice. Put everything into one file.")
    if not found.config:
        return flags, None, {}
    return flags, found.config[0], settings_in(found.config[0])


def settings_in(path: str) -> dict[str, Any]:
    """The settings of a YAML file.

    Raises:
        UsageError: it cannot be read, names a setting twice, or holds a date or a number in base 60.
    """
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
    """Refuse what YAML reads otherwise than it looks: 2024-01-01, 1:30, the first of two equal keys."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_nodes(item, path)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.value in lines:
            raise UsageError(
                f"{path}: `{key.value}` stands in lines {lines[key.value]} and {line}."
            )
        lines[str(key.value)] = line
        kind = value.tag.rpartition(":")[2]
        if kind == "timestamp" or (kind in ("int", "float") and ":" in value.value):
            raise UsageError(
                f"{path}, line {line}: `{key.value}: {value.value}` is a "
                f"{'date' if kind == 'timestamp' else 'number in base 60'} in YAML. A text needs quotes."
            )
        _check_nodes(value, path)


# ------------------------------------------------------------------------- the flags


def peeked(words: Sequence[str], name: str, default: Any) -> Any:
    """What a command line, or else its file, says of one flag, on which the rest depends."""
    flags, _, settings = with_config(words)
    parser = Parser(add_help=False, argument_default=settings.get(name, default))
    parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="?", const=True)
    return getattr(parser.parse_known_args(flags)[0], name)


def wants_dry_run(words: Sequence[str]) -> bool:
    """Whether flags, or else their file, ask to look only."""
    return str(peeked(words, "dry_run", False)).lower() in TRUE


def configs() -> dict[type, Mapping[str, Any]]:
    """The trainers' configurations, each with the variants that it knows."""
    from ..trainer.stgrpo_config import GROUP_VARIANTS, STGRPOConfig
    from ..trainer.stppo_config import VARIANTS, STPPOConfig

    return {STPPOConfig: VARIANTS, STGRPOConfig: GROUP_VARIANTS}


def flag_types(arguments: type, words: Sequence[str]) -> tuple[type, type, type]:
    """The dataclasses of task, trainer (by the variant) and model.

    Raises:
        UsageError: nobody knows the variant.
    """
    variant = peeked(words, "variant", "st-ppo")
    for config, known in configs().items():
        if variant is None or variant in known:
            return arguments, config, ModelConfig
    allowed = "; without a critic ".join(", ".join(known) for known in configs().values())
    raise UsageError(f"`variant={variant!r}`: allowed are {allowed}.")


def types_of(command: str, words: Sequence[str] = ()) -> list[type]:
    """The dataclasses of all flags of a command."""
    task = EvaluateArguments if command == "evaluate" else TrainArguments
    return list(dict.fromkeys((ARGUMENTS[command], *flag_types(task, words))))


def divided(
    types: Sequence[type], words: Sequence[str], others: Collection[str] = ()
) -> tuple[list[str], list[str], dict[str, Any]]:
    """The command's words, those of others, and what the file says to others.

    Args:
        types: dataclasses of the command's flags.
        words: of the command line.
        others: flags without dashes that are not the command's.

    Raises:
        UsageError: nobody knows one of them, or a value does not fit.
    """
    flags, path, settings = with_config(words)
    parser = FlagParser(types)
    own = {action.dest for action in parser._actions}
    parser.set_defaults_with_config(**settings)
    rest = parser.parse_known_args(flags)[1]
    known = own | set(others)
    if rest and not rest[0].startswith("-"):
        raise UsageError(f"`{rest[0]}` belongs to no flag.")
    for word in rest:
        name = word.lstrip("-").partition("=")[0].replace("-", "_")
        if word.startswith("--") and name not in known:
            raise UsageError(f"`{word}` is not known. {hint(name, known)}")
    for key in settings:  # one file may serve several commands
        if key not in known | {"env", *IGNORED, *_fields_of_commands()}:
            raise UsageError(f"`{key}` in {path} is not known. {hint(key, known)}")
    if isinstance(settings.get("env"), dict):  # launched processes inherit it
        os.environ.update({str(key): str(value) for key, value in settings["env"].items()})
    return (
        _without(words, rest),
        rest,
        {k: v for k, v in settings.items() if k in others and k not in own},
    )


def _fields_of_commands() -> Iterator[str]:
    for kind in (TrainArguments, EvaluateArguments, ModelConfig, *configs()):
        yield from (spec.name for spec in fields(kind))


def _without(words: Sequence[str], taken: Sequence[str]) -> list[str]:
    """The words less those of an ordered part of them."""
    rest, left = list(taken), []
    for word in words:
        if rest and word == rest[0]:
            rest.pop(0)
        else:
            left.append(word)
    return left


def read_flags(types: Sequence[type], words: Sequence[str]) -> list[Any]:
    """Instances of some dataclasses; a flag beats the file.

    Raises:
        UsageError: a name or a value is wrong.
    """
    from .launch import launch_flags

    words, rest, _ = divided(types, words, launch_flags())
    if rest:
        raise UsageError(f"`{' '.join(rest)}`: a launcher has started this process already.")
    flags, path, settings = with_config(words)
    without_ignored(settings)  # warns of what TRL's PPO has and this trainer has not
    given = flags if path is None else ["--config", path, *flags]
    try:
        found = FlagParser(types).parse_args_and_config(given, return_remaining_strings=True)
    except ValueError as error:  # what a configuration refuses are wrong words, too
        raise UsageError(str(error)) from error
    return list(found[: len(types)])
