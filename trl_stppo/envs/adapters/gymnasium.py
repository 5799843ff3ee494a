"""Gymnasium's toy-text games, with boards in plain text and actions in words."""

from collections.abc import Iterable
from typing import Any

from ._common import last_word, missing, no_episode


class _ToyTextEnv:
    """One game. Subclasses say how to read an action and how to describe a state."""

    _game: str
    _words: dict[str, int]  # what the model may write -> Gymnasium's number
    _rules: str

    def __init__(
        self,
        *,
        rules: str | None = None,
        invalid_reward: float = 0.0,
        max_steps: int | None = None,
        **options: Any,
    ) -> None:
        """Make the game.

        Args:
            rules: said before the first board; None for the built-in ones, "" for none.
            invalid_reward: of a turn without a readable action, which leaves the state as it is.
            max_steps: readable actions until the episode is truncated; None for Gymnasium's own.
            **options: of `gymnasium.make`, for example `is_slippery=False`.

        Raises:
            ImportError: `gymnasium` is not installed.
        """
        try:
            import gymnasium
        except ImportError as error:
            raise missing("gymnasium") from error
        self._env: Any = gymnasium.make(self._game, max_episode_steps=max_steps, **options)
        self._opening = self._rules if rules is None else rules
        self._invalid_reward = float(invalid_reward)
        self._state: Any = None  # None: no episode is running

    def reset(self, seed: int | None = None, **row: Any) -> tuple[str, dict[str, Any]]:
        """Start an episode; it follows from `seed`, a column of the row or else the trainer's own."""
        self._state, _ = self._env.reset(seed=seed)
        return "\n".join(filter(None, [self._opening, self._text(self._state)])), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play the last action word of the text; see `TextEnv.step` for what is returned.

        Raises:
            RuntimeError: no episode is running.
        """
        if self._state is None:
            raise no_episode()
        word = last_word(action, self._words)
        if word is None:
            told = f"Write one of {', '.join(self._words)}.\n{self._text(self._state)}"
            return told, self._invalid_reward, False, False, {"valid_action": False}
        state, reward, terminated, truncated, _ = self._env.step(self._words[word])
        info = {"valid_action": True}
        if terminated or truncated:
            info["success"] = bool(terminated and self._won(state, float(reward)))
        text = self._text(state)
        self._state = None if terminated or truncated else state
        return text, float(reward), bool(terminated), bool(truncated and not terminated), info

    def close(self) -> None:
        """Free what Gymnasium holds."""
        self._env.close()

    def _text(self, state: Any) -> str:
        raise NotImplementedError

    def _won(self, state: Any, reward: float) -> bool:
        raise NotImplementedError


class FrozenLakeEnv(_ToyTextEnv):
    """FrozenLake-v1: reach the goal without falling into a hole; reward 1 there."""

    _game = "FrozenLake-v1"
    _words = {"left": 0, "down": 1, "right": 2, "up": 3}  # noqa: RUF012
    _rules = (
        "You (@) walk on a frozen lake from S to the goal G over ice (F). H is a hole. The ice may "
        "be slippery. Each turn write left, down, right or up."
    )

    def _text(self, state: Any) -> str:
        lake = self._env.unwrapped.desc
        return _board(((cell.decode() for cell in row) for row in lake), int(state), lake.shape[1])

    def _won(self, state: Any, reward: float) -> bool:
        return self._env.unwrapped.desc.flat[int(state)] == b"G"


class CliffWalkingEnv(_ToyTextEnv):
    """CliffWalking-v1: -1 a step, -100 and back to the start for falling; ends at the goal.

    Gymnasium sets no limit on the steps of this game; `max_steps` does.
    """

    _game = "CliffWalking-v1"
    _words = {"up": 0, "right": 1, "down": 2, "left": 3}  # noqa: RUF012
    _rules = (
        "You (@) walk from S to the goal G. C is a cliff: who steps there falls and starts again at "
        "S. Each turn write up, right, down or left."
    )

    def _text(self, state: Any) -> str:
        cliff = self._env.unwrapped._cliff
        rows = [["C" if fatal else "." for fatal in row] for row in cliff]
        rows[-1][0], rows[-1][-1] = "S", "G"
        return _board(rows, int(state), cliff.shape[1])

    def _won(self, state: Any, reward: float) -> bool:
        return True  # the goal is the only end


class TaxiEnv(_ToyTextEnv):
    """Taxi-v4: fetch the passenger and bring them to their destination."""

    _game = "Taxi-v4"
    _words = {  # noqa: RUF012
        **{"south": 0, "north": 1, "east": 2, "west": 3, "pickup": 4, "dropoff": 5},
        **{"pick up": 4, "drop off": 5},
    }
    _rules = (
        "You drive a taxi (@). R, G, Y and B are places; | is a wall, : is open. Fetch the "
        "passenger and drop them off at their destination. Each turn write south, north, east, "
        "west, pickup or dropoff."
    )

    def _text(self, state: Any) -> str:
        game = self._env.unwrapped
        row, column, passenger, destination = game.decode(int(state))
        rows = [[cell.decode() for cell in line] for line in game.desc]
        rows[row + 1][2 * column + 1] = "@"
        where = f"waits at {'RGYB'[passenger]}" if passenger < 4 else "is in the taxi"
        board = "\n".join("".join(line) for line in rows)
        return f"{board}\nThe passenger {where} and wants to go to {'RGYB'[destination]}."

    def _won(self, state: Any, reward: float) -> bool:
        return True  # the right destination is the only end


class BlackjackEnv(_ToyTextEnv):
    """Blackjack-v1: one hand against the dealer; reward 1, 0 or -1, success only for a win."""

    _game = "Blackjack-v1"
    _words = {"stick": 0, "hit": 1, "stand": 0}  # noqa: RUF012
    _rules = (
        "Blackjack: come closer to 21 than the dealer without exceeding it. Each turn write hit for "
        "another card or stick to stop."
    )

    def _text(self, state: Any) -> str:
        total, dealer, usable_ace = state
        ace = ", with an ace that counts 11" if usable_ace else ""
        return f"Your hand: {int(total)}{ace}. The dealer shows {int(dealer)} (1 is an ace)."

    def _won(self, state: Any, reward: float) -> bool:
        return reward > 0


def _board(rows: Iterable[Iterable[str]], position: int, width: int) -> str:
    """The rows as text, with the player's own cell marked."""
    cells = [list(row) for row in rows]
    cells[position // width][position % width] = "@"
    text = "\n".join(" ".join(row) for row in cells)
    return f"{text}\nYou are in row {position // width + 1}, column {position % width + 1}."
