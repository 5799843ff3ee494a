"""TextWorld games: reward per step, text without the banner."""

import os
import re
from typing import Any

from ._common import action_text, missing, no_episode

_BANNER = re.compile(r"\A(?:[ _|\\/$<>]*\n)+")
_STATUS_LINE = re.compile(r"\n>[^\n]*\s*\Z")  # the prompt, padded, with room and score behind it

MAX_COMMAND_CHARS = 150  # Jericho cuts at 198 bytes, with a warning


class TextWorldEnv:
    """Interactive fiction; reward is what the score grew by, success is having won.

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
    ) -> None:
        """Create an environment; the game is loaded by the first reset.

        Args:
            game: path of a `.z8` file; None if every row names its own in the column `game`.
            admissible_commands: list the commands that the game accepts after every observation.
            invalid_reward: added to the reward of a turn whose command was not accepted.
            max_steps: turns until the episode is truncated; None for no limit.
        """
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
            ValueError: there is no such `.z8` file.
        """
        self._load(os.fspath(row.get("game") or self._game or ""))
        self._state, self._score, self._steps = self._env.reset(), 0.0, 0
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
        # The score is cumulative: what this turn earned is the difference.
        reward = float(score or 0) - self._score + (0.0 if valid else self._invalid_reward)
        self._score = float(score or 0)
        truncated = not done and self._max_steps is not None and self._steps >= self._max_steps
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
            feedback=True, won=True, moves=True, admissible_commands=self._admissible_commands
        )
        self._env, self._loaded = textworld.start(game, wanted), game

    def _text(self, state: Any) -> str:
        text = _STATUS_LINE.sub("", _BANNER.sub("", state.feedback))
        text = re.sub(r"\n{3,}", "\n\n", text).strip()
        commands = state.admissible_commands if self._admissible_commands else None
        return f"{text}\n\nCommands: {'; '.join(commands)}" if commands else text


def _command(action: str) -> str:
    """The last line of the action, fit for the interpreter: a NUL makes it hang or crash."""
    last = action_text(action).splitlines()[-1:]
    return "".join(filter(str.isprintable, "".join(last)))[:MAX_COMMAND_CHARS].strip()
