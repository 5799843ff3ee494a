"""Adapter of Gymnasium's environments whose observations are text or can be rendered as text."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import MissingPackageError
from ..base import Info

# One character between the terminal codes that start and end a colour.
_MARKED = re.compile(r"\x1b\[[\d;]*m(.)\x1b\[0?m")
_TAGGED = re.compile(r"<action>(.*?)</action>", re.DOTALL | re.IGNORECASE)


class GymnasiumEnv:
    """A Gymnasium environment, played as a text environment.

    The model reads the observation if it is a text, else the picture of `render_mode="ansi"`, with the
    coloured character in brackets.
    """

    def __init__(
        self,
        game: str,
        *,
        words: Mapping[str, object] | None = None,
        invalid_reward: float = 0.0,
        **options: object,
    ) -> None:
        """Create the Gymnasium environment.

        Args:
            game: id for `gymnasium.make`.
            words: word -> action of the game; the last such word of a turn counts. None passes the text.
            invalid_reward: reward of a turn without a word of `words`, which leaves the state unchanged.
            **options: arguments of `gymnasium.make`, such as `render_mode="ansi"`, `max_episode_steps=20`.
        """
        try:
            import gymnasium
        except ImportError as error:
            raise MissingPackageError("gymnasium") from error
        self._env: Any = gymnasium.make(game, **options)
        self._words, self._invalid_reward = words, float(invalid_reward)
        self._text = ""

    def reset(self, seed: int | None = None, **row: object) -> tuple[str, Info]:
        """Start an episode. `seed` comes from the row's column, or else from the trainer."""
        self._text = self._shown(self._env.reset(seed=seed)[0])
        return self._text, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Implement `TextEnv.step`: play one turn of the game."""
        played: Any = action_text(action)
        if self._words is not None:
            word = last_word(action, self._words)
            if word is None:
                reminder = f"Write one of {', '.join(self._words)}.\n{self._text}"
                return reminder, self._invalid_reward, False, False, {"valid_action": False}
            played = self._words[word]
        state, reward, terminated, truncated, info = self._env.step(played)
        result: Info = {"valid_action": True}
        if terminated or truncated:
            result["success"] = bool(info.get("success", terminated and float(reward) > 0))
        self._text = self._shown(state)
        return self._text, float(reward), bool(terminated), bool(truncated and not terminated), result

    def close(self) -> None:
        """Close the Gymnasium environment."""
        self._env.close()

    def _shown(self, state: object) -> str:
        if isinstance(state, str):
            return state
        return _MARKED.sub(r"[\1]", str(self._env.render() or state)).strip("\n")


def action_text(text: str) -> str:
    """Return the text in the last `<action>..</action>`, or the whole text if there is no such tag."""
    tagged = _TAGGED.findall(text)
    return str(tagged[-1] if tagged else text).strip()


def last_word(text: str, words: Iterable[str]) -> str | None:
    """Return the last of `words` that occurs in the action, in any case, or None if none occurs."""
    known = {word.casefold(): word for word in words}
    # Try longer words first, so that "go up" is not read as "go".
    choices = "|".join(re.escape(word) for word in sorted(known, key=len, reverse=True))
    found = re.findall(rf"(?<!\w)(?:{choices})(?!\w)", action_text(text).casefold())
    return known[found[-1]] if found else None
