"""Flags and YAML files: TrlParser's reading of them, with errors that say what to write instead."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import yaml
from trl import TrlParser

from .usage import UsageError, advice


class FlagParser(TrlParser):
    """TrlParser without abbreviations, which raises `UsageError` where argparse would end the process."""

    def __init__(self, dataclass_types: Any, **options: Any) -> None:
        super().__init__(dataclass_types, allow_abbrev=False, add_help=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing hundreds of flags."""
        raise UsageError(re.sub(r"^argument (--\w+)\S*: ", r"`\1`: ", message) + ".")

    def names(self) -> set[str]:
        """All flags, without dashes and with underscores."""
        options = (option for action in self._actions for option in action.option_strings)
        return {flag_name(option) for option in options if option.startswith("--")}


def flag_name(word: str) -> str:
    """`max_turns` of `--max-turns=3`."""
    return word.lstrip("-").partition("=")[0].replace("-", "_")


def read_flags(
    types: Sequence[type], words: Sequence[str], *, passed_over: Any = None
) -> list[Any]:
    """Instances of some dataclasses from flags and the file that `--config` names; a flag beats the file.

    Args:
        types: the dataclasses.
        words: flags and their values.
        passed_over: gives names that are let be where the file has them; called only if needed.

    Raises:
        UsageError: names or values that are not known, or a file that cannot be read.
    """
    flags, path, settings = with_config(words)
    parser = FlagParser(types)
    try:
        unknown = parser.parse_known_args(flags)[1]
        strange = strange_keys(parser, settings)
        if strange and passed_over is not None:
            strange = [key for key in strange if key not in passed_over()]
        refuse(unknown, strange, parser.names(), path)
        given = flags if path is None else ["--config", path, *flags]
        return list(parser.parse_args_and_config(given, return_remaining_strings=True)[:-1])
    except UsageError as error:
        flag = re.match(r"`--(\w+)`", str(error))
        if flag and flag[1] in settings and not any(flag_name(f) == flag[1] for f in flags):
            raise UsageError(f"In {path}: {error}") from error
        raise
    except ValueError as error:  # what a configuration refuses
        raise UsageError(str(error)) from error


def with_config(words: Sequence[str]) -> tuple[list[str], str | None, Mapping[str, Any]]:
    """The words without `--config`, the file that it names, and what the file holds.

    Raises:
        UsageError: the file cannot be read.
    """
    flags: list[str] = []
    path: str | None = None
    following = iter(words)
    for word in following:
        name, equals, value = word.partition("=")
        if name != "--config":
            flags.append(word)
            continue
        if path is not None:
            raise UsageError("`--config` is given twice. Put everything into one file.")
        path = value if equals else next(following, None)
        if not path:
            raise UsageError("`--config` needs the path of a YAML file behind it.")
    return flags, path, {} if path is None else _settings(path)


def _settings(path: str) -> Mapping[str, Any]:
    try:
        read = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise UsageError(f"`--config {path}` is no YAML: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"`--config {path}` cannot be read: {reason}. Check the path.") from error
    if not isinstance(read, dict):
        raise UsageError(
            f"`--config {path}` holds no settings. Write one per line, as in `max_turns: 4`."
        )
    return {str(key): value for key, value in read.items()}


def strange_keys(parser: FlagParser, settings: Mapping[str, Any]) -> list[str]:
    """Keys of a file that no flag of the parser reads; `env` holds variables of the environment."""
    known = {action.dest for action in parser._actions}
    return [key for key in settings if key not in known and key != "env"]


def refuse(
    unknown: Sequence[str], strange: Sequence[str], known: Collection[str], path: str | None
) -> None:
    """Raise for words and keys that nobody knows, with what to write instead."""
    said = []
    for flag, values in groups(unknown):
        if flag is None:
            said += [f"`{value}` belongs to no flag.{_named_file(value)}" for value in values]
            continue
        proposal = advice(flag_name(flag), known, elsewhere())
        said.append(f"`{' '.join([flag, *values])}`: not known here. {proposal}")
    for key in strange:
        proposal = advice(key, known, elsewhere(), dashes="")
        said.append(f"`{key}` in {path}: not known here. {proposal}")
    if said:
        raise UsageError("\n".join(said))


def groups(unknown: Sequence[str]) -> list[tuple[str | None, list[str]]]:
    """Each unknown flag with the values behind it; None for values without a flag before them."""
    groups: list[tuple[str | None, list[str]]] = []
    for word in unknown:
        if word.startswith("-"):
            groups.append((word, []))
        elif groups:
            groups[-1][1].append(word)
        else:
            groups.append((None, [word]))
    return groups


def _named_file(word: str) -> str:
    return (
        f" Name a file of settings by `--config {word}`."
        if word.endswith((".yaml", ".yml"))
        else ""
    )


def elsewhere() -> dict[str, set[str]]:
    """Flags of the other commands, and of launchers; looked up only for an error."""
    from ..trainer.stgrpo_config import STGRPOConfig
    from .agents import TrainArguments
    from .estimate import SHORT
    from .evaluate import EvaluateArguments
    from .launch import launch_flags
    from .play import PlayArguments
    from .show import ShowArguments

    owners = {
        "trl-stppo train": TrainArguments,
        "trl-stppo evaluate": EvaluateArguments,
        "trl-stppo env play": PlayArguments,
        "trl-stppo show": ShowArguments,
    }
    found = {command: {spec.name for spec in fields(owner)} for command, owner in owners.items()}
    found["trl-stppo train"] |= {spec.name for spec in fields(STGRPOConfig)}
    found["trl-stppo estimate"] = {flag_name(flag) for flag in SHORT}
    found["accelerate launch"] = launch_flags()
    return found
