"""TextArena's single-player games that were seen to work offline and to pay in numbers."""

import math
from numbers import Real
from typing import Any

from trl_stppo.errors import EnvironmentContractError

from ._common import PrivateRandomness, missing, no_episode

# game -> whether its reward of 1 says that it was solved (Blackjack and Set pay for hands and sets)
GAMES = {
    **dict.fromkeys(["2048", "Bandit", "Crosswords", "FifteenPuzzle", "FrozenLake"], True),
    **dict.fromkeys(["GuessTheNumber", "LightsOut", "LogicPuzzle", "Mastermind"], True),
    **dict.fromkeys(["Minesweeper", "PegJump", "RushHour", "Secretary", "Sokoban"], True),
    **dict.fromkeys(["Sudoku", "TowerOfHanoi"], True),
    **dict.fromkeys(["Blackjack", "Set"], False),
}
# After an invalid move these swap their message and their reward.
TEXT_AS_REWARD = ("Countdown", "Cryptarithm", "Slitherlink", "ThreeCardMonte")
TOO_SLOW = ("Sokoban-v0-medium",)  # no level within 15 seconds


class TextArenaEnv:
    """A single-player game of `textarena`, for example `GuessTheNumber-v0`.

    Each observation holds only what is new. The reward comes with the last turn; one invalid move is
    answered with a reminder, a second in a row ends the game.
    """

    def __init__(self, game: str, *, invalid_reward: float = 0.0, **options: Any) -> None:
        """Make the game.

        Args:
            game: id without `-raw` or `-train`.
            invalid_reward: of an invalid move that does not end the game.
            **options: of `textarena.make`.

        Raises:
            ImportError: `textarena` is not installed.
            ValueError: the game is not one of `GAMES`.
        """
        game = game.removesuffix("-raw").removesuffix("-train")
        self._name = game.partition("-v")[0]
        _check_game(game, self._name)
        # TextArena draws from the generators of the whole process, when imported too, and seeds them.
        self._randomness = PrivateRandomness()
        with self._randomness.installed():
            try:
                import textarena
            except ImportError as error:
                raise missing("textarena") from error
            self._env: Any = textarena.make(f"{game}-raw", **options)
        self._invalid_reward = float(invalid_reward)
        self._is_running = False

    def reset(self, seed: int | None = None, **row: Any) -> tuple[str, dict[str, Any]]:
        """Start an episode; it follows from `seed`, a column of the row or else the trainer's own."""
        with self._randomness.installed():
            self._env.reset(num_players=1, seed=seed)
        self._is_running = True
        return self._news(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one turn; see `TextEnv.step` for what is returned.

        Raises:
            EnvironmentContractError: the game paid with something else than a number.
            RuntimeError: no episode is running.
        """
        if not self._is_running:
            raise no_episode()
        with self._randomness.installed():
            done, _ = self._env.step(action=action)
        text = self._news()
        if not done:
            valid = self._env.state.error_count == 0
            reward = 0.0 if valid else self._invalid_reward
            return text, reward, False, False, {"valid_action": valid}
        self._is_running = False
        rewards, game_info = self._env.close()
        reward = self._number(rewards)
        info = {"valid_action": not game_info[0].get("invalid_move", False)}
        if GAMES[self._name]:
            info["success"] = reward >= 1.0
        return text, reward, True, False, info

    def _news(self) -> str:
        _, messages = self._env.get_observation()
        # The model's own words are in the conversation already.
        new = [text for _, text, kind in messages if kind.name != "PLAYER_ACTION"]
        return "\n\n".join(text.strip("\n") for text in new if text.strip())

    def _number(self, rewards: Any) -> float:
        reward = (rewards or {}).get(0)
        if not isinstance(reward, Real) or not math.isfinite(float(reward)):
            raise EnvironmentContractError(
                f"TextArena's {self._name} ended with the reward {reward!r}; allowed is a finite "
                f"number. The game itself is at fault: play another one of {', '.join(GAMES)}."
            )
        return float(reward)


def _check_game(game: str, name: str) -> None:
    if name in TEXT_AS_REWARD:
        why = f"after an invalid move {name} returns its message as the reward"
    elif game in TOO_SLOW:
        why = f"{game} takes too long to make a level"
    elif name not in GAMES:
        why = f"{name} needs several players, a download or a key, or was never tried"
    else:
        return
    raise ValueError(f"game is {game!r}: {why}. Allowed are the ids of {', '.join(GAMES)}.")
