"""Adapter of GEM's environments, with private random generators."""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from ...errors import MissingPackageError
from ..base import Info

if TYPE_CHECKING:
    import datasets

Split = Literal["train", "test"]
SEEDS = {"train": range(10_000), "test": range(10_000, 10_200)}
# Lock around swaps of the states of `random` and `numpy.random`, which all threads of a process share.
_GLOBAL_GENERATORS = threading.RLock()


class GemEnv:
    r"""A GEM environment, chosen by its id, for example `game:GuessTheNumber-v0-easy`.

    A game gets the text of a turn unchanged; most games parse `\boxed{..}` and end an invalid turn with
    -0.1. A game's own limit on turns terminates it and is no truncation: its rules mention the limit.
    """

    @classmethod
    def datasets(cls) -> dict[str, Callable[[Split], "datasets.Dataset"]]:
        """Return the default data sets by name, one row per seed: 10,000 seeds to train, 200 to test."""
        return {"gem-seeds": _seeds}

    def __init__(self, env_id: str, **options: object) -> None:
        """Make the environment with the arguments of `gem.make`."""
        # Protect the global generators: GEM draws from them and reseeds them, even during its import.
        self._randomness = PrivateRandomness()
        with self._randomness.installed():
            try:
                import gem
                from gem.utils.constants import LanguageGameReward
            except ImportError as error:
                raise MissingPackageError("gem-llm", "gem") from error
            self._env: Any = gem.make(env_id, **options)
        self._rewards: Any = LanguageGameReward

    def reset(self, seed: int | None = None, **row: object) -> tuple[str, Info]:
        """Start an episode. `seed` comes from the row's column, or else from the trainer."""
        with self._randomness.installed():
            observation, info = self._env.reset(seed=seed)
        return _with_suffix(observation, info), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Play one turn of the game."""
        with self._randomness.installed():
            observation, reward, terminated, truncated, shown = self._env.step(action)
        reward = float(reward)
        info = {"valid_action": reward != self._rewards.format_error_reward}
        if terminated or truncated:
            # Games that reward earlier turns pay less for the win, so only the text's first word shows a win.
            won = reward >= self._rewards.success_reward
            info["success"] = won or observation.startswith("Congratulations")
        text = _with_suffix(observation, shown)
        return text, reward, bool(terminated), bool(truncated and not terminated), info


class PrivateRandomness:
    """Private state of the generators `random` and `numpy.random`, for one environment.

    It is for packages that draw from, or reseed, the global generators. Their calls run inside
    `installed()`, one thread at a time: the generators continue from this environment's last call, and
    are restored afterwards. A thread that draws without this lock may still see the wrong state.
    """

    def __init__(self) -> None:
        import numpy as np

        self._states: tuple[Any, Any] = random.Random().getstate(), np.random.RandomState().get_state()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Context manager in which the global generators have this environment's private state."""
        import numpy as np

        with _GLOBAL_GENERATORS:
            outside = random.getstate(), np.random.get_state()
            random.setstate(self._states[0])
            np.random.set_state(self._states[1])
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                random.setstate(outside[0])
                np.random.set_state(outside[1])


def _with_suffix(observation: str, info: Info) -> str:
    """Return the observation with the game's board, which most GEM games put into `info`."""
    return "\n".join(filter(None, [observation.rstrip("\n"), info.get("suffix", "")]))


def _seeds(split: Split) -> "datasets.Dataset":
    """Return a data set with one row per seed. Prompts are empty, because `reset` returns the rules."""
    from datasets import Dataset

    seeds = list(SEEDS[split])
    prompt = [{"role": "user", "content": ""}]
    return Dataset.from_dict({"prompt": [prompt] * len(seeds), "seed": seeds})
