"""Parse flags and YAML files of `train` and `evaluate` with TRL's parser, strictly."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from trl import ModelConfig, TrlParser

from ..trainer.config.names import IGNORED, without_ignored
from .arguments import EvaluateArguments, TrainArguments
from .usage import Parser, UsageError, hint

TRUE = ("yes", "true", "t", "y", "1")  # as the parser reads them, in any case


class FlagParser(Parser, TrlParser):
    """TRL's parser, without abbreviated flags and without `--help`."""

    def __init__(self, dataclass_types: Sequence[type], **options: Any) -> None:
        super().__init__(dataclass_types, **{"add_help": False, **options})


# ------------------------------------------------------------------------- the file


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
                f"{path}, line {line}: `{key.value}: {value.value}` is a "
                f"{'date' if kind == 'timestamp' else 'number in base 60'} in YAML. A text needs quotes."
            )
        _check_nodes(value, path)


# ------------------------------------------------------------------------- the flags


def peeked(words: Sequence[str], name: str, default: Any) -> Any:
    """Read a single flag before the full parse, from the command line or else from the YAML file."""
    flags, _, settings = with_config(words)
    parser = Parser(add_help=False, argument_default=settings.get(name, default))
    parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="?", const=True)
    return getattr(parser.parse_known_args(flags)[0], name)


def wants_dry_run(words: Sequence[str]) -> bool:
    """Return whether the command line, or else the YAML file, sets `dry_run`."""
    return str(peeked(words, "dry_run", False)).lower() in TRUE


def configs() -> dict[type, Mapping[str, Any]]:
    """Return the trainers' configuration classes, each with its variants."""
    from ..trainer.stgrpo_config import GROUP_VARIANTS, STGRPOConfig
    from ..trainer.stppo_config import VARIANTS, STPPOConfig

    return {STPPOConfig: VARIANTS, STGRPOConfig: GROUP_VARIANTS}


def flag_types(arguments: type, words: Sequence[str]) -> tuple[type, type, type]:
    """Return the flag dataclasses of task, trainer and model. `--variant` selects the trainer's."""
    variant = peeked(words, "variant", "st-ppo")
    for config, known in configs().items():
        if variant is None or variant in known:
            return arguments, config, ModelConfig
    allowed = "; without a critic ".join(", ".join(known) for known in configs().values())
    raise UsageError(f"`variant={variant!r}`: allowed are {allowed}.")


def types_of(command: str, words: Sequence[str] = ()) -> list[type]:
    """Return the dataclasses of a command's flags."""
    return list(flag_types(EvaluateArguments if command == "evaluate" else TrainArguments, words))


def divided(
    types: Sequence[type], words: Sequence[str], others: Collection[str] = ()
) -> tuple[list[str], list[str], dict[str, Any]]:
    """Divide a command line between the command and the launcher, whose flags are `others`.

    Returns:
        The command's words, the others' words, and the others' settings of the file.
    """
    flags, path, settings = with_config(words)
    parser = FlagParser(types)
    flags_here = {action.dest for action in parser._actions}
    parser.set_defaults_with_config(**settings)
    rest = parser.parse_known_args(flags)[1]
    known = flags_here | set(others)
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
    theirs = {k: v for k, v in settings.items() if k in others and k not in flags_here}
    return _without(words, rest), rest, theirs


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
    from .launch import launch_flags

    words, rest, _ = divided(types, words, launch_flags())
    if rest:
        raise UsageError(f"`{' '.join(rest)}`: a launcher has started this process already.")
    flags, path, settings = with_config(words)
    without_ignored(settings)  # warns of settings that only TRL's PPO has
    parsed_words = flags if path is None else ["--config", path, *flags]
    try:
        found = FlagParser(types).parse_args_and_config(parsed_words, return_remaining_strings=True)
    except ValueError as error:  # a configuration rejects a value
        raise UsageError(str(error)) from error
    return [_with_home(part) for part in found[: len(types)]]


def _with_home(value: Any) -> Any:
    """Return a value whose texts, in lists and dataclasses too, do not begin with `~`."""
    if is_dataclass(value) and not isinstance(value, type):
        vars(value).update({name: _with_home(part) for name, part in vars(value).items()})
    if isinstance(value, list):
        return [_with_home(part) for part in value]
    return os.path.expanduser(value) if str(value).startswith("~/") else value
