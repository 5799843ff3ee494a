"""Agents for generated text adventures: games, rows, demonstrations (docs/recipes.md)."""

from .games import THEMES, GameKind, make_games, write_rows
from .rows import SYSTEM_PROMPT, demonstration, game_rows

__all__ = [
    "SYSTEM_PROMPT",
    "THEMES",
    "GameKind",
    "demonstration",
    "game_rows",
    "make_games",
    "write_rows",
]
