"""Settings of `STGRPOTrainer`: STPPOConfig's, less the critic's."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from ..core import GROUP_SCALES
from .config.names import Preset, option, takes_old_names
from .stppo_config import STPPOConfig

GROUP_VARIANTS = {
    "grpo": ("token", False),
    "gspo": ("sequence", False),
    "turn-grpo": ("turn", False),
    "s-grpo": ("token", True),
    "st-grpo": ("turn", True),
}
BY_LEVEL = {"token": "grpo", "turn": "st-grpo", "sequence": "gspo"}
# Options that say how a critic is trained, or how its values become advantages.
CRITICS_OPTIONS = (
    *("gamma", "lam", "advantage_level", "bootstrap_truncated"),
    *("whiten_rewards", "whiten_advantages", "cliprange_value", "vf_coef"),
    *("critic_learning_rate", "critic_max_grad_norm", "critic_warmup_steps", "critic_lora_r"),
    *("value_model_name_or_path", "kl_coef", "kl_estimator"),
)


@takes_old_names
@dataclass(repr=False)
class STGRPOConfig(STPPOConfig):
    """Configuration of [`STGRPOTrainer`]: all of [`STPPOConfig`] but what concerns a critic.

    Setting what does, or rewards per token, is an error. `scale_rewards` and `beta` work as in GRPO.

    Source: arXiv:2511.20718v2 (SO-GRPO, SORL); Shao et al. 2024, arXiv:2402.03300.
    """

    _TRAINER: ClassVar[str] = "STGRPOTrainer"
    _VARIANTS: ClassVar[dict[str, tuple[str, bool]]] = GROUP_VARIANTS
    _BY_LEVEL: ClassVar[dict[str, str]] = BY_LEVEL
    _HONOURS: ClassVar[tuple[str, ...]] = ("scale_rewards",)

    variant: str | None = option(
        Preset("st-grpo"), f"One of {', '.join(GROUP_VARIANTS)}, or None: free choice."
    )
    num_generations: int | None = option(8, "Episodes per prompt, at least 2.")
    num_iterations: int = option(1, "Epochs over each rollout batch.")
    kl_coef: float = option(0.0, "Only 0: use beta.")

    def __post_init__(self) -> None:
        super().__post_init__()
        defaults = {spec.name: spec.default for spec in fields(self)}
        given = [name for name in CRITICS_OPTIONS if getattr(self, name) != defaults[name]]
        if given:
            named = ", ".join(f"`{name}={getattr(self, name)!r}`" for name in given)
            raise ValueError(
                f"{named}: not supported by STGRPOConfig, where there is no critic and an advantage belongs "
                f"to a whole episode. Leave {'it' if len(given) == 1 else 'them'} out, or use STPPOConfig; "
                f"the KL in the loss is `beta`."
            )
        if self.num_generations is None or self.num_generations < 2:
            raise ValueError(
                f"`num_generations={self.num_generations}`: an advantage relative to a group needs at "
                f"least 2 episodes per prompt. Raise it, or use STPPOConfig, which has a critic instead."
            )
        if self.scale_rewards not in GROUP_SCALES:
            raise ValueError(
                f"`scale_rewards={self.scale_rewards!r}`: allowed are "
                f"{', '.join(map(repr, GROUP_SCALES))}."
            )
