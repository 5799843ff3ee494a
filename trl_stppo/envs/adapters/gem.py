"""GEM's environments, without their grip on the global random generators."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from ._common import PrivateRandomness, missing, no_episode

if TYPE_CHECKING:
    import datasets

Split = Literal["train", "test"]
SEEDS = {"train": range(10_000), "test": range(10_000, 10_200)}


class GemEnv:
    r"""An environment of `gem-llm` by its id, for example `game:GuessTheNumber-v0-easy`.

    The text of a turn goes to the game as it is; most games read `\boxed{..}` and end, with -0.1,
    on a turn that they cannot read. A game's own limit on turns is an end of the game, not a
    truncation: the rules mention it, and some games pay for the last turn.
    """

    @classmethod
    def datasets(cls) -> dict[str, Callable[[Split], "datasets.Dataset"]]:
        """Rows that hold a seed each, 10,000 and 200 others; what commands take unless told."""
        return {"gem-seeds": _seeds}

    def __init__(self, env_id: str, **options: Any) -> None:
        """Make the environment.

        Args:
            env_id: as for `gem.make`.
            **options: passed on to `gem.make`.

        Raises:
            ImportError: `gem-llm` is not installed.
        """
        # GEM draws from the generators of the whole process, when imported too, and reseeds them.
        self._randomness = PrivateRandomness()
        with self._randomness.installed():
            try:
                import gem
                from gem.utils.constants import LanguageGameReward
            except ImportError as error:
                raise missing("gem-llm", "gem") from error
            self._env: Any = gem.make(env_id, **options)
        self._rewards: Any = LanguageGameReward
        self._is_running = False

    def reset(self, seed: int | None = None, **row: Any) -> tuple[str, dict[str, Any]]:
        """Start an episode; it follows from `seed`, a column of the row or else the trainer's own."""
        with self._randomness.installed():
            observation, info = self._env.reset(seed=seed)
        self._is_running = True
        return _with_suffix(observation, info), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one turn; see `TextEnv.step` for what is returned.

        Raises:
            RuntimeError: no episode is running.
        """
        if not self._is_running:
            raise no_episode()
        with self._randomness.installed():
            observation, reward, terminated, truncated, told = self._env.step(action)
        reward = float(reward)
        info = {"valid_action": reward != self._rewards.format_error_reward}
        if terminated or truncated:
            self._is_running = False
            # Games that pay along the way end with less than the full reward, but say so.
            won = reward >= self._rewards.success_reward
            info["success"] = won or observation.startswith("Congratulations")
        text = _with_suffix(observation, told)
        return text, reward, bool(terminated), bool(truncated and not terminated), info


def _with_suffix(observation: str, info: dict[str, Any]) -> str:
    """GEM keeps the board of most games apart from the observation, in `info`."""
    return "\n".join(filter(None, [observation.rstrip("\n"), info.get("suffix", "")]))


def _seeds(split: Split) -> "datasets.Dataset":
    """The rules are said by `reset`, so the prompt is empty."""
    from datasets import Dataset

    seeds = list(SEEDS[split])
    prompt = [{"role": "user", "content": ""}]
    return Dataset.from_dict({"prompt": [prompt] * len(seeds), "seed": seeds})
