"""Agents that play generated text adventures: games, rows, demonstrations (docs/environments.md)."""

from .games import GameKind, make_games
from .rows import SYSTEM_PROMPT, demonstration, game_rows

__all__ = ["SYSTEM_PROMPT", "GameKind", "demonstration", "game_rows", "make_games"]
