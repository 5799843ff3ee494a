"""Plays a prompt without an environment: an episode of one turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .chat import Message
from .episode import Episode


class PlainDriver:
    """Drives episodes without environment and tools.

    `read`: (ids of a turn, ids before it) -> assistant message.
    """

    type_name = None
    trusted_text = False

    def __init__(self, read: Callable[[list[int], list[int]], Message]) -> None:
        self.tools: list[Any] = []
        self._read = read

    def opening(self, episode: Episode, index: int, seed: int) -> None:
        """Return None: there is no environment to reset."""

    def message(self, episode: Episode, ids: list[int]) -> Message:
        """The turn as an assistant message."""
        return self._read(ids, episode.prompt_ids)

    def turn(self, episode: Episode, message: Message) -> None:
        """Return None: the first turn is the last."""

    def scoring(self, episode: Episode) -> None:
        """Return None: reward functions score the episode."""
