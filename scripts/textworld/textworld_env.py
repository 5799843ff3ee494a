"""An environment of TextWorld games, with a reward per turn and without the banner in the text.

It needs `pip install 'textworld>=1.7'`.
"""

import os
import re
import threading
import warnings
from collections.abc import Sequence
from typing import Any, Literal

_TAGGED = re.compile(r"<action>(.*?)</action>", re.DOTALL | re.IGNORECASE)
_BANNER = re.compile(r"\A(?:[ _|\\/$<>]*\n)+")
# The status line has the padded prompt, then room and score.
_STATUS_LINE = re.compile(r"\n>[^\n]*\s*\Z")

# TextWorld has one parser for all games, which is not thread-safe.
_PARSER = threading.Lock()

# Shorten commands, because Jericho cuts them at 198 bytes with a warning.
MAX_COMMAND_CHARS = 150
PARTS = ("feedback", "description", "inventory")
REWARDS = ("score", "dense", "sparse")


class TextWorldEnv:
    """A TextWorld game. By default, a turn's reward is the growth of the score. Success is a won game.

    An action is the text in `<action>..</action>`, or the last line of the turn. `valid_action` is False
    if the game's parser rejects the command, which takes no move of the game.
    """

    def __init__(
        self,
        game: str | os.PathLike[str] | None = None,
        *,
        invalid_reward: float = 0.0,
        max_steps: int | None = None,
        show: Sequence[str] = ("feedback",),
        reward: Literal["score", "dense", "sparse"] = "score",
    ) -> None:
        """Create an environment. The first reset loads the game.

        Args:
            game: path of a `.z8` file; None for the path in the row's column `game`.
            invalid_reward: added to the reward of a turn with a rejected command.
            max_steps: turns until the episode is truncated; None for the row's column `max_turns`,
                or else no limit.
            show: parts of an observation, in order: "feedback" (the response to the command),
                "description" (of the room), "inventory". A part that the feedback contains is left out.
            reward: "score", growth of the score; "dense", growth divided by the game's maximum, so that an
                episode sums to at most 1; "sparse", 1 on the winning turn and 0 on others.
        """
        if not show or not {*show} <= {*PARTS}:
            raise ValueError(f"show is {show!r}; allowed are {', '.join(PARTS)}.")
        if reward not in REWARDS:
            raise ValueError(f"reward is {reward!r}; allowed are {', '.join(REWARDS)}.")
        self._show, self._reward = tuple(show), reward
        self._game = None if game is None else os.fspath(game)
        self._invalid_reward = float(invalid_reward)
        self._max_steps = max_steps
        self._env: Any = None
        self._loaded: str | None = None
        # None while no episode is running.
        self._state: Any = None

    def reset(self, **row: Any) -> tuple[str, dict[str, Any]]:
        """Start the game of the row's column `game`, or else the constructor's game."""
        self._load(os.fspath(row.get("game") or self._game or ""))
        self._state, self._score, self._steps = self._env.reset(), 0.0, 0
        if self._reward == "dense" and not 0 < self._state.max_score < float("inf"):
            raise ValueError(
                f"reward is 'dense', but {self._loaded} has no maximum score; allowed: 'score', 'sparse'."
            )
        self._limit = self._max_steps or row.get("max_turns")
        return self._text(self._state), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one command."""
        if self._state is None:
            raise RuntimeError("no episode is running: call reset before step.")
        moves = self._state.moves
        state, score, done = self._env.step(_command(action))
        self._steps += 1
        valid = bool(done) or state.moves > moves
        score = float(score or 0)
        reward = self._reward_of(state, score) + (0.0 if valid else self._invalid_reward)
        self._score = score
        truncated = not done and self._limit is not None and self._steps >= self._limit
        info = {"valid_action": valid}
        if done or truncated:
            info["success"] = bool(state.won)
        text = self._text(state)
        self._state = None if done or truncated else state
        return text, reward, bool(done), truncated, info

    def close(self) -> None:
        """Stop the interpreter of the game."""
        if self._env is not None:
            self._env.close()
        self._env = self._loaded = self._state = None

    def _load(self, game: str) -> None:
        # Import names, because a folder called `textworld` (as in `scripts/`) can be imported but lacks them.
        from textworld import EnvInfos, start

        if game == self._loaded:
            return
        if not (game.endswith(".z8") and os.path.isfile(game)):
            raise ValueError(f"game is {game!r}; must be the path of a .z8 file.")
        self.close()
        wanted = EnvInfos(
            won=True,
            moves=True,
            max_score=self._reward == "dense",
            **dict.fromkeys(("feedback", *self._show), True),
        )
        # TextWorld warns for each game, but the warning does not matter here.
        warnings.filterwarnings("ignore", message=".*change detection will be disabled")
        with _PARSER:
            self._env, self._loaded = start(game, wanted), game

    def _reward_of(self, state: Any, score: float) -> float:
        if self._reward == "sparse":
            return float(state.won)
        # The score is cumulative, so a turn's reward is the difference.
        return (score - self._score) / (state.max_score if self._reward == "dense" else 1)

    def _text(self, state: Any) -> str:
        feedback = _clean(state.feedback)
        parts = {part: _clean(getattr(state, part)) for part in self._show}
        return "\n\n".join(
            part
            for name, part in parts.items()
            if name == "feedback" or "feedback" not in parts or part not in feedback
        )


def _clean(text: str) -> str:
    text = _STATUS_LINE.sub("", _BANNER.sub("", text))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _command(action: str) -> str:
    """Return the last line of the action, without characters that crash the interpreter (NUL, backslash)."""
    text = (_TAGGED.findall(action) or [action])[-1].strip()
    last = "".join(text.splitlines()[-1:]).replace("\\", "")
    return "".join(filter(str.isprintable, last))[:MAX_COMMAND_CHARS].strip()
