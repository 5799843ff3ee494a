"""Make TextWorld games in a folder, one per seed, data set rows from them, and demonstrations."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from textworld_env import TextWorldEnv

MANIFEST = "games.jsonl"
THEMES = ("house", "basic")
# Worlds per seed; one may have no quest of this length, or a shortcut.
TRIES = 100
SYSTEM_PROMPT = (
    "You are playing a text adventure. The first message says what to do; after each of your turns you "
    "are told what has happened. The last line of a turn is the command that is played, such as: open "
    "chest. One command a turn, and nothing behind it."
)
Row = dict[str, Any]


@dataclass(frozen=True)
class GameKind:
    """The difficulty of generated games. The same seed with another kind makes another game.

    Attributes:
        rooms: of the world, >= 1.
        objects: minimum number, those of the quest included, >= 1.
        quest_length: exact number of steps of the quest, >= 1.
        step_points: a point for every step that reaches a new state, all of them needed to win,
            as in `tw-make tw-simple --rewards dense`. Otherwise one point, for the last step.
        theme: TextWorld's grammar: "house", or "basic" with few words and numbered objects.
    """

    rooms: int = 2
    objects: int = 3
    quest_length: int = 4
    step_points: bool = False
    theme: str = "house"

    def __post_init__(self) -> None:
        for name in ("rooms", "objects", "quest_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; must be >= 1.")
        if self.theme not in THEMES:
            raise ValueError(f"theme is {self.theme!r}; allowed are {', '.join(THEMES)}.")

    @property
    def name(self) -> str:
        """Return the name of the kind, such as `w2-o3-q4`."""
        marks = ("-points" if self.step_points else "", "-basic" if self.theme == "basic" else "")
        return f"w{self.rooms}-o{self.objects}-q{self.quest_length}{''.join(marks)}"


def make_games(folder: str | os.PathLike[str], kind: GameKind, seeds: Iterable[int]) -> list[Row]:
    """Make one game per seed. Games that are in the manifest already are reused.

    A game takes half a second. An interrupted call leaves only complete games.

    Args:
        folder: of the games and of `games.jsonl`, their manifest; one process at a time.
        kind: difficulty.
        seeds: >= 0, one game each; the same seed and kind make the same game on any machine.

    Returns:
        A row per game: `game` (path of the `.z8` file), `kind`, `seed`, `steps`, `max_score`,
        `walkthrough` (commands that win).

    Raises:
        ValueError: a seed is negative, or there is no such game.
    """
    folder = Path(folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / MANIFEST
    lines = manifest.read_text().splitlines() if manifest.is_file() else []
    rows = {row["game"]: row for row in map(json.loads, lines)}
    games = []
    for seed in seeds:
        name = f"{kind.name}-s{seed}.z8"
        if name not in rows:
            rows[name] = _make(folder / name, kind, seed)
            write_rows(manifest, rows.values())
        games.append({**rows[name], "game": str(folder / name)})
    return games


def write_rows(path: str | os.PathLike[str], rows: Iterable[Row]) -> None:
    """Write rows as JSON lines atomically. Missing folders are created."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_suffix(".incomplete")
    staging.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(staging, path)


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


def demonstration(row: Row, env: TextWorldEnv, commands: Sequence[str] | None = None) -> list[dict[str, str]]:
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


def _make(path: Path, kind: GameKind, seed: int) -> Row:
    try:
        from textworld.generator import compile_game
    except ImportError as error:
        raise ImportError("TextWorld is missing: pip install 'textworld>=1.7'.") from error
    options, game = _generate(kind, seed)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=path.parent) as aside:
        options.path = str(Path(aside) / path.name)
        compiled = Path(compile_game(game, options))
        # The description, with the score, before the game.
        for made in (compiled.with_suffix(".json"), compiled):
            os.replace(made, path.parent / made.name)
    row = {"game": path.name, "kind": asdict(kind), "seed": seed, "steps": kind.quest_length}
    return {**row, "max_score": int(game.max_score), "walkthrough": game.walkthrough}


def _generate(kind: GameKind, seed: int) -> tuple[Any, Any]:
    """Return options and game of the first world from the seed that has the kind's quest length."""
    from textworld.generator import GameOptions, QuestGenerationError, make_game

    if seed < 0:
        raise ValueError(f"seed is {seed}; must be >= 0.")
    for attempt in range(TRIES):
        options = GameOptions()
        options.seeds = seed * TRIES + attempt
        options.nb_rooms, options.nb_objects = kind.rooms, kind.objects
        options.quest_length, options.quest_breadth = kind.quest_length, 1
        options.grammar.theme = kind.theme
        try:
            game = make_game(options)
        except QuestGenerationError:
            continue
        if len(game.walkthrough or ()) == kind.quest_length:
            if kind.step_points:
                _score_steps(game)
            return options, game
    raise ValueError(
        f"seed {seed}: none of {TRIES} worlds of {kind} has a quest of quest_length={kind.quest_length}."
    )


def _score_steps(game: Any) -> None:
    """Replace the game's quests by one quest for every step that reaches a new state."""
    from textworld.generator.game import Event, GameProgression, Quest

    actions, state = GameProgression(game).winning_policy, game.world.state.copy()
    quests, before = [], [state.copy()]
    for count, action in enumerate(actions, start=1):
        commands = game.walkthrough[:count]
        event = Event(actions[:count], commands=commands)
        if not any(event.is_triggering(earlier) for earlier in before):
            quests.append(Quest([event], commands=commands))
        state.apply(action)
        before.append(state.copy())
    game.quests = tuple(quests)
