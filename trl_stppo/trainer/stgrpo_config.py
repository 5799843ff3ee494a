"""Settings of `STGRPOTrainer`: STPPOConfig without the critic's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from ..core import GROUP_SCALES
from .options import option, takes_ignored
from .stppo_config import STPPOConfig

# Variant -> its (importance_sampling_level, whether its updates are stabilised).
GROUP_VARIANTS: dict[str, tuple[str, bool]] = {
    **{"grpo": ("token", False), "gspo": ("sequence", False), "st-grpo": ("turn", True)},
    **{"rloo": ("token", False), "rebn": ("token", False)},
}
# Variant -> its baseline of advantages, if not the group's mean. They set neither level nor stabilizers.
ESTIMATORS = {"rloo": "leave_one_out", "rebn": "batch"}
CRITICS_OPTIONS = (
    *("gamma", "lam", "advantage_level", "bootstrap_truncated"),
    *("whiten_rewards", "cliprange_value", "vf_coef"),
    *("critic_learning_rate", "critic_warmup_steps", "kl_coef", "kl_estimator"),
)


@takes_ignored
@dataclass(repr=False)
class STGRPOConfig(STPPOConfig):
    """Configuration of [`STGRPOTrainer`]: [`STPPOConfig`] without the critic's options.

    Setting one of these options, or options of rewards per token, is an error. `beta` works as in GRPO.
    `variant` also sets the baseline of an advantage: the mean score of the group's other episodes (`rloo`),
    the mean of the discounted returns of all turns of the batch (`rebn`, which allows one episode per
    prompt), or else the mean score of the group. `rloo` and `rebn` allow any level and stabilizers; unset,
    they are "token" and none. `scale_rewards` works only with the group's mean, `gamma` only with `rebn`.

    Source: arXiv:2511.20718v2 (SO-GRPO, SORL); Shao et al. 2024, arXiv:2402.03300; Ahmadian et al. 2024,
    arXiv:2402.14740 (RLOO); GEM, arXiv:2510.01051 (ReBN).
    """

    trainer_name: ClassVar[str] = "STGRPOTrainer"
    _VARIANTS: ClassVar[Mapping[str, tuple[str, bool]]] = GROUP_VARIANTS
    _HONOURS: ClassVar[tuple[str, ...]] = ("scale_rewards",)

    variant: str | None = option(
        None,
        f"One of {', '.join(GROUP_VARIANTS)}. Default the one that fits the level; without it st-grpo.",
    )
    num_generations: int | None = option(8, "Episodes per prompt, at least 2; with ReBN 1.")
    num_iterations: int = option(  # type: ignore[assignment]
        None,
        "Epochs over each rollout batch. Default 4 with stabilizers, which act on later steps, else 1.",
    )
    kl_coef: float = option(0.0, "Only 0: use beta.")

    def _resolve_variant(self) -> None:
        super()._resolve_variant()
        if self.num_iterations is None and self.num_ppo_epochs is None:
            self.num_iterations = STPPOConfig.num_iterations if self.stabilizers else 1

    def _take_variant(self, level: str, stabilised: bool) -> None:
        if self.variant in ESTIMATORS:
            level = self.importance_sampling_level or level
            stabilised = bool(self.stabilizers)
        super()._take_variant(level, stabilised)

    def _resolve_critic(self) -> None:
        """Accept and unset `critic_learning_rate=1e-5`, because files shared with STPPOConfig set it."""
        if self.critic_learning_rate == 1e-5:
            self.critic_learning_rate = None

    @property
    def advantage_estimator(self) -> str:
        """Return the variant's baseline of advantages: "group", "leave_one_out" or "batch"."""
        return ESTIMATORS.get(self.variant or "", "group")

    @property
    def needs_groups(self) -> bool:
        """Return whether advantages compare several episodes of the same prompt."""
        return self.advantage_estimator != "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        defaults = {spec.name: spec.default for spec in fields(self)}
        refused = [name for name in CRITICS_OPTIONS if name != "gamma" or self.needs_groups]
        given = [name for name in refused if getattr(self, name) != defaults[name]]
        if given:
            named = ", ".join(f"`{name}={getattr(self, name)!r}`" for name in given)
            discounted = " `gamma` belongs to ReBN: variant='rebn'." if "gamma" in given else ""
            raise ValueError(
                f"{named}: not supported by STGRPOConfig with `variant={self.variant!r}`, which has no "
                f"critic. The KL in the loss is `beta`.{discounted}"
            )
        if self.needs_groups and (self.num_generations is None or self.num_generations < 2):
            raise ValueError(
                f"`num_generations={self.num_generations}`; allowed: >= 2, or variant='rebn' without groups."
            )
        scales = GROUP_SCALES if self.advantage_estimator == "group" else ("group",)
        if self.scale_rewards not in scales:
            raise ValueError(
                f"`scale_rewards={self.scale_rewards!r}` with `variant={self.variant!r}`; allowed are "
                f"{', '.join(map(repr, scales))}."
            )
