"""Adapter of GEM's environments, with private random generators."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from ...errors import MissingPackageError
from ..base import Info
from ._common import PrivateRandomness, no_episode

if TYPE_CHECKING:
    import datasets

Split = Literal["train", "test"]
SEEDS = {"train": range(10_000), "test": range(10_000, 10_200)}


class GemEnv:
    r"""A GEM environment, chosen by its id, for example `game:GuessTheNumber-v0-easy`.

    A game gets the text of a turn unchanged; most games parse `\boxed{..}` and end an invalid turn with
    -0.1. A game's own limit on turns terminates it and is no truncation: its rules mention the limit.
    """

    @classmethod
    def datasets(cls) -> dict[str, Callable[[Split], "datasets.Dataset"]]:
        """Return the default data sets by name, one row per seed: 10,000 to train, 200 others to test."""
        return {"gem-seeds": _seeds}

    def __init__(self, env_id: str, **options: object) -> None:
        """Make the environment with the arguments of `gem.make`."""
        # Protect the global generators: GEM draws from them and reseeds them, already when it is imported.
        self._randomness = PrivateRandomness()
        with self._randomness.installed():
            try:
                import gem
                from gem.utils.constants import LanguageGameReward
            except ImportError as error:
                raise MissingPackageError("gem-llm", "gem") from error
            self._env: Any = gem.make(env_id, **options)
        self._rewards: Any = LanguageGameReward
        self._is_running = False

    def reset(self, seed: int | None = None, **row: object) -> tuple[str, Info]:
        """Start an episode. `seed` comes from the row's column, or else from the trainer."""
        with self._randomness.installed():
            observation, info = self._env.reset(seed=seed)
        self._is_running = True
        return _with_suffix(observation, info), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Implement `TextEnv.step`: play one turn of the game."""
        if not self._is_running:
            raise no_episode()
        with self._randomness.installed():
            observation, reward, terminated, truncated, shown = self._env.step(action)
        reward = float(reward)
        info = {"valid_action": reward != self._rewards.format_error_reward}
        if terminated or truncated:
            self._is_running = False
            # Games that reward earlier turns pay less for the win, which only the text's first word shows.
            won = reward >= self._rewards.success_reward
            info["success"] = won or observation.startswith("Congratulations")
        text = _with_suffix(observation, shown)
        return text, reward, bool(terminated), bool(truncated and not terminated), info


def _with_suffix(observation: str, info: Info) -> str:
    """Return the observation with the game's board, which most GEM games put into `info`."""
    return "\n".join(filter(None, [observation.rstrip("\n"), info.get("suffix", "")]))


def _seeds(split: Split) -> "datasets.Dataset":
    """Return a data set with one row per seed. Prompts are empty, because `reset` returns the rules."""
    from datasets import Dataset

    seeds = list(SEEDS[split])
    prompt = [{"role": "user", "content": ""}]
    return Dataset.from_dict({"prompt": [prompt] * len(seeds), "seed": seeds})
