"""Make TextWorld games, rows of them for `trl-stppo train`, and demonstrations (docs/recipes.md).

python scripts/textworld/make_textworld.py --train 1000 --test 100 --output data/textworld
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from adventures import (
    SYSTEM_PROMPT,
    THEMES,
    GameKind,
    demonstration,
    game_rows,
    make_games,
    write_rows,
)
from textworld_env import TextWorldEnv

# So far behind the training games' seeds.
TEST_SEEDS = 10**6
PARTS = ["description", "feedback", "inventory"]


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = flags.add_argument
    add("--output", type=Path, required=True, help="folder to write, or to add to")
    add("--train", type=int, default=1000, metavar="N", help="games; half a second each, once")
    add("--test", type=int, default=100, metavar="N", help="games of other seeds")
    add("--rooms", type=int, default=GameKind.rooms, metavar="N")
    add("--objects", type=int, default=GameKind.objects, metavar="N", help="at least so many")
    add("--quest_length", type=int, default=GameKind.quest_length, metavar="N", help="in steps")
    add("--step_points", action="store_true", help="a point for every step, for dense rewards")
    add("--theme", choices=THEMES, default=GameKind.theme, help="basic: few words")
    add("--seed", type=int, default=0, help="of the first training game")
    add("--turns_per_step", type=float, default=2.0, metavar="X", help="of an episode")
    add("--show", nargs="+", default=PARTS, help="observations in the demonstrations")
    return flags


def main() -> None:
    args = parser().parse_args()
    seeds = {
        "train": range(args.seed, args.seed + args.train),
        "test": range(args.seed + TEST_SEEDS, args.seed + TEST_SEEDS + args.test),
    }
    try:
        kind = GameKind(args.rooms, args.objects, args.quest_length, args.step_points, args.theme)
        env = TextWorldEnv(show=args.show)
        for split, numbers in seeds.items():
            games = make_games(args.output / "games", kind, numbers)
            rows = game_rows(games, system=SYSTEM_PROMPT, turns_per_step=args.turns_per_step)
            write_rows(args.output / f"{split}.jsonl", rows)
            if split == "train":
                shown = [{"messages": demonstration(row, env)} for row in rows]
                write_rows(args.output / "demonstrations" / "messages.jsonl", shown)
    except (ValueError, OSError, ImportError) as error:
        # A reader can mend these.
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"rows: {args.output}\ndemonstrations: {args.output / 'demonstrations'}")


if __name__ == "__main__":
    main()
