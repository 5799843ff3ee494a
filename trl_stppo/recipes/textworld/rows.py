"""Make data set rows from TextWorld games, and demonstrations in the same format."""

from collections.abc import Iterable, Sequence
from typing import Any

from trl_stppo.envs.adapters import TextWorldEnv

SYSTEM_PROMPT = (
    "You are playing a text adventure. The first message says what to do; after each of your turns you "
    "are told what has happened. The last line of a turn is the command that is played, such as: open "
    "chest. One command a turn, and nothing behind it."
)
Row = dict[str, Any]


def game_rows(
    games: Iterable[Row], *, system: str | None = SYSTEM_PROMPT, turns_per_step: float = 2.0
) -> list[Row]:
    """Make data set rows for `TextWorldEnv`. The first observation becomes the user's message.

    Args:
        games: of `make_games`.
        system: the system message; None for none.
        turns_per_step: turns of an episode for each step of the solution, rounded down, >= 1. More
            than 2 did not help in "A Practitioner's Guide to Multi-turn Agentic Reinforcement
            Learning" (arXiv:2510.01132).
    """
    if turns_per_step < 1:
        raise ValueError(f"turns_per_step is {turns_per_step}; must be >= 1.")
    first = [] if system is None else [{"role": "system", "content": system}]
    prompt = [*first, {"role": "user", "content": ""}]
    names = ("game", "seed", "steps", "max_score", "walkthrough")
    return [
        {
            "prompt": prompt,
            **{name: game[name] for name in names},
            "max_turns": int(turns_per_step * game["steps"]),
        }
        for game in games
    ]


def demonstration(
    row: Row, env: TextWorldEnv, commands: Sequence[str] | None = None
) -> list[dict[str, str]]:
    """Play commands and return the messages, for TRL's `SFTTrainer` with `assistant_only_loss`.

    Args:
        row: of `game_rows`.
        env: with the settings of the training.
        commands: played until the episode ends; None for the row's walkthrough.

    Returns:
        Messages, up to the last command.
    """
    opening, _ = env.reset(**row)
    *before, last = row["prompt"]
    messages = [*before, {**last, "content": last["content"] + opening}]
    for command in row["walkthrough"] if commands is None else commands:
        observation, _, terminated, truncated, _ = env.step(command)
        messages.append({"role": "assistant", "content": command})
        if terminated or truncated:
            return messages
        messages.append({"role": "user", "content": observation})
    return messages[:-1]
