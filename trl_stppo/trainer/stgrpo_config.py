"""Settings of `STGRPOTrainer`: STPPOConfig's, less the critic's."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar

from ..core import GROUP_SCALES
from .stppo_config import STPPOConfig

GROUP_VARIANTS = {
    "grpo": ("token", False),
    "gspo": ("sequence", False),
    "turn-grpo": ("turn", False),
    "s-grpo": ("token", True),
    "st-grpo": ("turn", True),
}
# Options that say how a critic is trained, or how its values become advantages.
CRITICS_OPTIONS = (
    *("gamma", "lam", "advantage_level", "bootstrap_truncated"),
    *("whiten_rewards", "whiten_advantages", "cliprange_value", "vf_coef"),
    *("critic_learning_rate", "critic_max_grad_norm", "critic_warmup_steps", "critic_lora_r"),
    *("value_model_name_or_path", "kl_coef", "kl_estimator"),
)


@dataclass(repr=False)
class STGRPOConfig(STPPOConfig):
    r"""Configuration of [`STGRPOTrainer`].

    All of [`STPPOConfig`] is inherited but what concerns a critic and rewards per token: setting one of
    those is an error.

    Parameters:
        variant (`str`, *optional*): `"grpo"`, `"gspo"`, `"turn-grpo"`, `"s-grpo"` or `"st-grpo"`
            (default); `None` leaves ratio and correction free.
        num_generations (`int`): episodes per prompt, at least 2.
        num_iterations (`int`): epochs over each rollout batch.
        scale_rewards (`str`): whose standard deviation divides the advantages, `"group"`, `"batch"` or
            `"none"`.
        beta (`float`): weight of the KL to the reference policy in the loss, as in GRPO.

    Source: arXiv:2511.20718v2 (SO-GRPO, SORL); Shao et al. 2024, arXiv:2402.03300.
    """

    _TRAINER: ClassVar[str] = "STGRPOTrainer"
    _VARIANTS: ClassVar[dict[str, tuple[str, bool]]] = GROUP_VARIANTS
    _HONOURS: ClassVar[tuple[str, ...]] = ("scale_rewards",)

    variant: str | None = field(
        default="st-grpo", metadata={"help": f"One of {', '.join(GROUP_VARIANTS)}."}
    )
    num_generations: int | None = field(default=8, metadata={"help": "Episodes per prompt."})
    num_iterations: int = field(default=1, metadata={"help": "Epochs over each rollout batch."})
    kl_coef: float = field(default=0.0, metadata={"help": "Only 0: use beta."})

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
