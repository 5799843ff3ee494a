"""Makes TextWorld games into a folder: one per seed, each with a row of a manifest."""

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trl_stppo.envs.adapters._common import missing

MANIFEST = "games.jsonl"
THEMES = ("house", "basic")
TRIES = 100  # per seed; a world may have no quest of the length, or one with a shortcut
Row = dict[str, Any]


@dataclass(frozen=True)
class GameKind:
    """How difficult games are; another kind makes other games from the same seeds.

    Attributes:
        rooms: of the world, >= 1.
        objects: at least so many, those of the quest included, >= 1.
        quest_length: steps that the quest takes, no more and no less, >= 1.
        step_points: a point for every step that reaches something new, all of them needed to win,
            as in `tw-make tw-simple --rewards dense`. Otherwise one point, for the last.
        theme: TextWorld's grammar: "house", or "basic" with few words and numbered things.
    """

    rooms: int = 2
    objects: int = 3
    quest_length: int = 4
    step_points: bool = False
    theme: str = "house"

    def __post_init__(self) -> None:
        for name in ("rooms", "objects", "quest_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed are 1 and more.")
        if self.theme not in THEMES:
            raise ValueError(f"theme is {self.theme!r}; allowed are {', '.join(THEMES)}.")

    @property
    def name(self) -> str:
        """As the games of a kind are called: `w2-o3-q4`."""
        marks = ("-points" if self.step_points else "", "-basic" if self.theme == "basic" else "")
        return f"w{self.rooms}-o{self.objects}-q{self.quest_length}{''.join(marks)}"


def make_games(folder: str | os.PathLike[str], kind: GameKind, seeds: Iterable[int]) -> list[Row]:
    """Games of these seeds; those that the manifest has are not made again.

    A game is generated and compiled aside, in half a second, and its row is written when both of its
    files have their names: what an interrupted call leaves is whole games.

    Args:
        folder: of the games and of `games.jsonl`, their manifest; one process at a time.
        kind: how difficult.
        seeds: >= 0, one game each; the same seed and kind make the same game on any machine.

    Returns:
        A row per game: `game` (path of the `.z8` file), `kind`, `seed`, `steps`, `max_score` (points
        to be had), `walkthrough` (commands that win).

    Raises:
        ImportError: `textworld` is not installed.
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
    """A row a line, in JSON; the file is complete or as it was, its folder is made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_suffix(".incomplete")
    staging.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(staging, path)


def _make(path: Path, kind: GameKind, seed: int) -> Row:
    try:
        from textworld.generator import compile_game
    except ImportError as error:
        raise missing("textworld") from error
    options, game = _generate(kind, seed)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=path.parent) as aside:
        options.path = str(Path(aside) / path.name)
        compiled = Path(compile_game(game, options))
        # The description first: where the game is, what tells its score is too.
        for made in (compiled.with_suffix(".json"), compiled):
            os.replace(made, path.parent / made.name)
    row = {"game": path.name, "kind": asdict(kind), "seed": seed, "steps": kind.quest_length}
    return {**row, "max_score": int(game.max_score), "walkthrough": game.walkthrough}


def _generate(kind: GameKind, seed: int) -> tuple[Any, Any]:
    """Options and game: the first of the seed's tries whose quest has the length."""
    from textworld.generator import GameOptions, QuestGenerationError, make_game

    if seed < 0:
        raise ValueError(f"seed is {seed}; allowed are 0 and more.")
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
        f"seed {seed}: none of {TRIES} worlds with rooms={kind.rooms}, objects={kind.objects} has a "
        f"quest of quest_length={kind.quest_length} steps. Lower it, or take more rooms and objects."
    )


def _score_steps(game: Any) -> None:
    """Make a quest of every step, unless what it reaches has held before (the way back)."""
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
