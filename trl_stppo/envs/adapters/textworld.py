"""TextWorld games: reward per step, text without the banner."""

import os
import re
import threading
import warnings
from collections.abc import Sequence
from typing import Any, Literal

from ._common import action_text, missing, no_episode

_BANNER = re.compile(r"\A(?:[ _|\\/$<>]*\n)+")
_STATUS_LINE = re.compile(r"\n>[^\n]*\s*\Z")  # the prompt, padded, with room and score behind it

# TextWorld reads all games with one parser, which breaks when two threads use it.
_PARSER = threading.Lock()

MAX_COMMAND_CHARS = 150  # Jericho cuts at 198 bytes, with a warning
PARTS = ("feedback", "description", "inventory")
REWARDS = ("score", "dense", "sparse")


class TextWorldEnv:
    """Interactive fiction; reward is by default what the score grew by, success is having won.

    An action is what stands in `<action>..</action>`, or the last line of the turn. `valid_action`
    is False where the game's parser does not accept a command, which takes no move of the game.
    """

    def __init__(
        self,
        game: str | os.PathLike[str] | None = None,
        *,
        admissible_commands: bool = False,
        invalid_reward: float = 0.0,
        max_steps: int | None = None,
        show: Sequence[str] = ("feedback",),
        reward: Literal["score", "dense", "sparse"] = "score",
    ) -> None:
        """Create an environment; the game is loaded by the first reset.

        Args:
            game: path of a `.z8` file; None if every row names its own in the column `game`.
            admissible_commands: list the commands that the game accepts after every observation.
            invalid_reward: added to the reward of a turn whose command was not accepted.
            max_steps: turns until the episode is truncated; None for the row's column `max_turns`,
                or else no limit.
            show: what an observation consists of, in this order: "feedback" (the answer to the
                command), "description" (of the room), "inventory". What the feedback has said
                already (the room, on entering it) is not said again.
            reward: "score", growth of the score; "dense", the same divided by the most that the game
                gives, so that an episode sums to at most 1, and to 1 if won where all points are
                needed to win; "sparse", 1 on the turn that wins and 0 on all others.

        Raises:
            ValueError: `show` or `reward` is not of these.
        """
        if not show or not {*show} <= {*PARTS}:
            raise ValueError(f"show is {show!r}; name at least one of {', '.join(PARTS)}.")
        if reward not in REWARDS:
            raise ValueError(f"reward is {reward!r}; allowed are {', '.join(REWARDS)}.")
        self._show, self._reward = tuple(show), reward
        self._game = None if game is None else os.fspath(game)
        self._admissible_commands = admissible_commands
        self._invalid_reward = float(invalid_reward)
        self._max_steps = max_steps
        self._env: Any = None
        self._loaded: str | None = None
        self._state: Any = None  # None: no episode is running

    def reset(self, **row: Any) -> tuple[str, dict[str, Any]]:
        """Start the game of the row's column `game`, or else the constructor's.

        Raises:
            ImportError: `textworld` is not installed.
            ValueError: there is no such `.z8` file, or no points in it to take shares of.
        """
        self._load(os.fspath(row.get("game") or self._game or ""))
        self._state, self._score, self._steps = self._env.reset(), 0.0, 0
        if self._reward == "dense" and not 0 < self._state.max_score < float("inf"):
            raise ValueError(
                f"reward is 'dense', and {self._loaded} gives {self._state.max_score} points: there are "
                f"no shares of that. Take reward='score' or 'sparse'."
            )
        self._limit = self._max_steps or row.get("max_turns")
        return self._text(self._state), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one command; see `TextEnv.step` for what is returned.

        Raises:
            RuntimeError: no episode is running.
        """
        if self._state is None:
            raise no_episode()
        moves = self._state.moves
        state, score, done = self._env.step(_command(action))
        self._steps += 1
        valid = bool(done) or state.moves > moves
        reward = self._earned(state, float(score or 0)) + (0.0 if valid else self._invalid_reward)
        self._score = float(score or 0)
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
        try:
            import textworld
        except ImportError as error:
            raise missing("textworld") from error
        if game == self._loaded:
            return
        if not (game.endswith(".z8") and os.path.isfile(game)):
            raise ValueError(
                f"game is {game!r}; TextWorldEnv needs the path of a .z8 file that exists. Name one "
                f"in the constructor or in the column game. A .json game has no text to show."
            )
        self.close()
        wanted = textworld.EnvInfos(
            won=True,
            moves=True,
            max_score=self._reward == "dense",
            admissible_commands=self._admissible_commands,
            **dict.fromkeys(("feedback", *self._show), True),
        )
        # One line per game, and TextWorld keeps the score by itself.
        warnings.filterwarnings("ignore", message=".*change detection will be disabled")
        with _PARSER:
            self._env, self._loaded = textworld.start(game, wanted), game

    def _earned(self, state: Any, score: float) -> float:
        if self._reward == "sparse":
            return float(state.won)
        # The score is cumulative: what this turn earned is the difference.
        return (score - self._score) / (state.max_score if self._reward == "dense" else 1)

    def _text(self, state: Any) -> str:
        feedback = _clean(state.feedback)
        parts = {part: _clean(getattr(state, part)) for part in self._show}
        text = "\n\n".join(
            part
            for name, part in parts.items()
            if name == "feedback" or "feedback" not in parts or part not in feedback
        )
        commands = state.admissible_commands if self._admissible_commands else None
        return f"{text}\n\nCommands: {'; '.join(commands)}" if commands else text


def _clean(text: str) -> str:
    text = _STATUS_LINE.sub("", _BANNER.sub("", text))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _command(action: str) -> str:
    """The last line of the action, fit for the interpreter: a NUL or a backslash makes it hang or crash."""
    last = "".join(action_text(action).splitlines()[-1:]).replace("\\", "")
    return "".join(filter(str.isprintable, last))[:MAX_COMMAND_CHARS].strip()
