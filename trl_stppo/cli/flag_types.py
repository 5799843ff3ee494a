"""Which dataclasses hold the flags of a command, and a first look at its words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from trl import ModelConfig

from .arguments import ARGUMENTS, TRAINERS, AgentArguments, TrainArguments
from .early import peeked, wants_dry_run
from .flags import known_words
from .launch import launch_flags
from .names import NO_MODEL, UNPAID, no_rows
from .objects import load_reward
from .sources import configs
from .usage import UsageError


def config_of(variant: str | None, *, whole: bool = True) -> type:
    """The configuration that knows a variant.

    Args:
        variant: its name; None for free choice.
        whole: imported, and not its fields alone.

    Raises:
        UsageError: nobody knows it.
    """
    known = configs(whole=whole)
    for config, variants in known:
        if variant is None or variant in variants:
            return config
    with_critic, without = (", ".join(map(repr, variants)) for _, variants in known)
    raise UsageError(
        f"`variant={variant!r}`: allowed are {with_critic}, and without a critic {without}."
    )


def flag_types(
    arguments: type, words: Sequence[str], *, whole: bool = True
) -> tuple[type, type, type]:
    """The dataclasses whose fields are the flags of a training or an evaluation."""
    config = config_of(peeked(words, "variant", "st-ppo"), whole=whole)
    return arguments, config, ModelConfig


def types_of(command: str, words: Sequence[str] = (), *, whole: bool = True) -> list[type]:
    """The dataclasses of all flags of a command."""
    own = ARGUMENTS[command]
    if command not in TRAINERS:
        return [own]
    task = own if issubclass(own, AgentArguments) else TrainArguments
    return list(dict.fromkeys((own, *flag_types(task, words, whole=whole))))


def check_words(command: str, words: Sequence[str]) -> None:
    """Refuse what no flag, type or choice fits, before the seconds that the imports of a command take.

    What configurations refuse besides, they refuse when they are made.

    Raises:
        UsageError: words, keys or values; or what a training cannot do without is not named.
    """
    own, *types = types_of(command, words, whole=False)
    others = launch_flags() if command in TRAINERS else ()
    _, given, _ = known_words([own, *types], words, others, warns=False)
    own(**{spec.name: getattr(given, spec.name) for spec in fields(own)})
    if command not in ("train", "evaluate") or wants_dry_run(words):
        return  # a dry run tells all problems together
    for path in given.reward_funcs or []:
        if not {".", ":"} & {*path}:  # a name of TRL's, or none
            load_reward(path, "reward_funcs")
    if command == "train" and given.model_name_or_path is None:
        raise UsageError(NO_MODEL)
    if given.environment in (None, "none"):
        if not (given.dataset_name or given.datasets):
            raise no_rows(given.environment)
        if command == "train" and not (given.reward_funcs or given.reward_model_name_or_path):
            raise UsageError(f"Nothing pays a reward: {UNPAID}")
