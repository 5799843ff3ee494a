"""Flags and YAML files as TrlParser reads them, and argparse's help on them."""

from __future__ import annotations

import argparse
import inspect
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from trl import ModelConfig, TrlParser

from ..trainer.config.names import IGNORED, without_ignored
from .arguments import EvaluateArguments, TrainArguments
from .early import with_config
from .launch import LAUNCHED, as_words, launch_arguments, launch_flags, shipped, told
from .sources import configs
from .usage import Parser, UsageError, flag_name, names_of, refuse

logger = logging.getLogger(__name__)

# Module and name of a dataclass, from the most derived on -> heading of what it adds or changes.
HEADINGS = (
    ("trl_stppo.cli", "Estimate", "short names"),
    ("trl_stppo.cli", "", "task"),
    ("trl_stppo.trainer", "ST", "STPPO"),
    ("trl_stppo.trainer", "PPO", "PPO"),
    ("trl.trainer.model_config", "", "model (TRL)"),
    ("trl.scripts", "", "task"),
    ("trl", "GRPO", "GRPO (TRL)"),
    ("", "", "training (TRL and transformers)"),
)


class FlagParser(Parser, TrlParser):
    """TrlParser whose help is grouped by where flags come from."""

    def __init__(self, dataclass_types: Sequence[type], **options: Any) -> None:
        options = {"add_help": False, "formatter_class": _Formatter, **options}
        super().__init__(dataclass_types, **options)
        found = {action.dest: action for action in reversed(self._actions)}  # not their --no_ twins
        sections: dict[str, list[argparse.Action]] = {heading: [] for *_, heading in HEADINGS}
        for kind in dataclass_types:
            for spec in (spec for spec in fields(kind) if spec.init):
                source = next(c for c in kind.__mro__ if spec.name in inspect.get_annotations(c))
                sections[heading_of(source)].append(found.pop(spec.name))
        for heading, actions in sections.items():
            self.add_argument_group(heading)._group_actions += actions
        self._optionals._group_actions = [a for a in self._actions if a.dest in found]

    def set_defaults_with_config(self, **settings: Any) -> list[str]:
        """Upstream's, for what a file holds; what changes nothing is left out."""
        return super().set_defaults_with_config(**without_ignored(settings))


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """One spelling of each flag with the type of its value, and defaults other than None."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        metavar = self._get_default_metavar_for_optional(action)
        value = "" if action.nargs == 0 else f" {self._format_args(action, metavar)}"
        return ", ".join(o for o in action.option_strings if "-" not in o[2:]) + value

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        name = getattr(action.type, "__name__", "value")
        return {"string_to_bool": "BOOL", "str": "TEXT"}.get(name, name.upper())

    def _get_help_string(self, action: argparse.Action) -> str:
        default = getattr(action.default, "value", action.default)
        shown = default not in (None, argparse.SUPPRESS) and action.nargs != 0
        return f"{action.help or ''} (default {default})" if shown else action.help or ""


def heading_of(source: type) -> str:
    """The group of what a dataclass adds or changes."""
    return next(
        heading
        for module, name, heading in HEADINGS
        if source.__module__.startswith(module) and source.__name__.startswith(name)
    )


def help_of(types: Sequence[type], *, launched: bool, **texts: str) -> str:
    """What `--help` says of a command.

    Args:
        types: dataclasses of its flags.
        launched: it takes the launcher's too.
        texts: as argparse's parser takes them.
    """
    usage = "%(prog)s [--config FILE] [--flag VALUE ...]"
    parser = FlagParser(types, add_help=True, usage=usage, **texts)
    parser.add_argument("--help_all", action="help", help="show all flags, some 400, and exit")
    parser.add_argument("--config", metavar="FILE", help="YAML file of flags, without dashes")
    if launched:
        parser.add_argument(
            "--accelerate_config",
            metavar="FILE",
            help=f"configuration of accelerate: a file, or one that is shipped: {', '.join(shipped())}; all "
            "flags of `accelerate launch --help` that are not below are taken too",
        )
    return parser.format_help()


def read_flags(types: Sequence[type], words: Sequence[str]) -> list[Any]:
    """Instances of some dataclasses from flags and the file that `--config` names; a flag beats the file.

    Raises:
        UsageError: names or values that are not known, or a file that cannot be read.
    """
    parser, *_ = known_words(types, words)
    flags, path, settings = with_config(words)
    with told_where(flags, path, settings):
        flags = without_ignored_flags(flags, warns=False)
        given = flags if path is None else ["--config", path, *flags]
        return list(parser.parse_args_and_config(given, return_remaining_strings=True)[:-1])


def known_words(
    types: Sequence[type], words: Sequence[str], others: Collection[str] = (), *, warns: bool = True
) -> tuple[FlagParser, argparse.Namespace, list[str]]:
    """A parser of some dataclasses, what it reads, and the words that it leaves to others.

    Args:
        types: the dataclasses.
        words: flags and their values.
        others: flags that it leaves, without dashes.
        warns: of settings of TRL's PPO that change nothing.

    Raises:
        UsageError: names or values that nobody knows.
    """
    flags, path, settings = with_config(words)
    parser = FlagParser(types)
    with told_where(flags, path, settings):
        flags = without_ignored_flags(flags, warns=warns)
        unknown = parser.parse_known_args(flags)[1]
        known = names_of(parser)
        refuse(unknown, known | set(others), strange_keys(parser, settings), path)
        TrlParser.set_defaults_with_config(parser, **settings)
        # As words, of which argparse looks at the choices too.
        texts = [f"--{k}={v}" for k, v in settings.items() if k in known and isinstance(v, str)]
        return parser, parser.parse_known_args([*texts, *flags])[0], unknown


@contextmanager
def told_where(
    flags: Sequence[str], path: str | None, settings: Mapping[str, Any]
) -> Iterator[None]:
    """Name the file that a wrong value is from; what a configuration refuses are wrong words, too."""
    try:
        yield
    except UsageError as error:
        flag = re.match(r"`--(\w+)`", str(error))
        if flag and flag[1] in settings and not any(flag_name(f) == flag[1] for f in flags):
            raise UsageError(f"In {path}: {error}") from error
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error


def strange_keys(parser: FlagParser, settings: Mapping[str, Any]) -> list[str]:
    """Keys of a file that no command knows.

    One file may serve several commands, each of which takes what is its own; `env` holds variables of the
    environment.
    """
    strange = set(settings) - {action.dest for action in parser._actions} - {"env"}
    strange -= set(IGNORED)
    if strange:
        owners: list[type] = [TrainArguments, EvaluateArguments, ModelConfig]
        owners += [config for config, _ in configs(whole=False)]
        strange -= {spec.name for owner in owners for spec in fields(owner)} | launch_flags()
    return [key for key in settings if key in strange]


def divided(types: Sequence[type], words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command's words, and the launcher's: those of the YAML file, then those of the command line.

    Args:
        types: dataclasses of the command's flags.
        words: flags of the command and of the launcher.

    Raises:
        UsageError: nobody knows one of them, or there is a launcher already.
    """
    parser, _, unknown = known_words(types, words, launch_flags(), warns=False)
    if told():
        if unknown:
            raise UsageError(
                f"`{' '.join(unknown)}`: this process has been started by a launcher already. Give it to "
                f"that one, or leave that one out."
            )
        return list(words), []
    names, settings = launch_flags() - {a.dest for a in parser._actions}, with_config(words)[2]
    filed = [w for key, value in settings.items() if key in names for w in as_words(key, value)]
    launch_arguments([*filed, *unknown], [LAUNCHED])  # refuses wrong values
    return without(words, unknown), [*filed, *unknown]


def without(words: Sequence[str], taken: Sequence[str]) -> list[str]:
    """The words less those of an ordered part of them."""
    rest, left = list(taken), []
    for word in words:
        if rest and word == rest[0]:
            rest.pop(0)
        else:
            left.append(word)
    return left


def without_ignored_flags(words: Sequence[str], *, warns: bool = True) -> list[str]:
    """Flags without those of TRL's PPO that change nothing; a warning of each, if it `warns`."""
    left: list[str] = []
    name = None
    for word in words:
        if word.startswith("--"):
            name = flag_name(word) if flag_name(word) in IGNORED else None
            if name is not None and warns:
                logger.warning("`--%s` is ignored: %s.", name, IGNORED[name])
        if name is None:
            left.append(word)
    return left
