"""Settings of `STPPOTrainer`: PPOConfig with turn-level ratios and stabilizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..core import TOKEN_CLIPRANGE
from .options import option, takes_ignored
from .ppo_config import PPOConfig
from .stabilizers import STABILIZERS, Stabilizer, check_linear, scales, weighs

# Stabilizers of a stabilised variant. "winners" is not a default, because it converges too early if the
# policy has not found a way to play yet (docs/stability.md).
DEFAULT_STABILIZERS = ("share",)
# Prefix of a variant's name -> (importance_sampling_level, whether its updates are stabilised)
KINDS = {
    **{"": ("token", False), "turn-": ("turn", False)},
    **{"s-": ("token", True), "st-": ("turn", True)},
}
VARIANTS = {f"{kind}ppo": meaning for kind, meaning in KINDS.items()}


class Preset(str):
    """String default, distinguishable by type from an equal value that the user sets."""

    def __str__(self) -> str:
        return self


@takes_ignored
@dataclass(repr=False)
class STPPOConfig(PPOConfig):
    """Configuration of [`STPPOTrainer`]: [`PPOConfig`] with turn-level ratios and stabilizers.

    `variant` sets `importance_sampling_level` and `stabilizers`; setting one of them to a value
    that contradicts the variant is an error. A level without a variant selects the variant.

    Source: arXiv:2511.20718v1, Sections 4 and 5; the signals of `"share"` and `"winners"`
    are this package's own. VCPO (arXiv:2602.17616) scales the step too, as `"share"`
    does.
    """

    trainer_name: ClassVar[str] = "STPPOTrainer"
    _VALID_LEVELS: ClassVar[tuple[str, ...]] = ("token", "turn", "sequence")
    _VARIANTS: ClassVar[dict[str, tuple[str, bool]]] = VARIANTS
    # Level that is set without a variant -> its variant.
    _BY_LEVEL: ClassVar[dict[str, str]] = {"token": "s-ppo", "turn": "st-ppo"}
    # How to measure the clipping bias: "exact" or "logits". None: exact if a stabilizer scales by the bias
    # and none weighs episodes or measures the KL. A stabilizer that needs exact norms always gets them.
    # Sharded gradients always give estimates. Only studies set this.
    _clip_bias_estimator: ClassVar[str | None] = None

    variant: str | None = option(
        Preset("st-ppo"), f"One of {', '.join(VARIANTS)}, or None: free choice."
    )
    importance_sampling_level: str | None = option(
        None, "'token', 'turn' or 'sequence'; set by variant, or chooses it."
    )
    epsilon: float | None = option(
        None,
        "Half-width of the clip interval (cliprange). Default 0.2 for token ratios; for turn and sequence "
        "ratios 0.2 divided by the mini-batch's mean number of tokens per turn or episode.",
    )
    lam: float | None = option(
        None,
        "GAE's lambda, 0 <= lam <= 1, per token or turn like gamma. Default 0.95 for token ratios; else 0.9 "
        "per turn, which is 0.9 to the power of 1 / n per token, n the rollout's mean of tokens per turn.",
    )
    stabilizers: list[str] | None = option(  # type: ignore[misc]
        None,
        "Any of these, or none; set by variant: "
        + "; ".join(f"'{name}' {kind.meaning}" for name, kind in STABILIZERS.items())
        + ".",
    )
    desired_kl: float = option(
        0.1,
        "Of 'trust_region': the KL that an update may have where there is most to gain, nats per turn, > 0.",
    )

    def __post_init__(self) -> None:
        self.stabilizers = _listed(self.stabilizers)
        self._resolve_variant()
        of_tokens = self.importance_sampling_level == "token" or self.epsilon_high is not None
        if of_tokens and self.cliprange is None and self.epsilon is None:
            self.epsilon = TOKEN_CLIPRANGE
        super().__post_init__()
        if not self.desired_kl > 0:
            raise ValueError(f"`desired_kl={self.desired_kl}`: must satisfy desired_kl > 0.")
        if self.scales_step:
            check_linear(str(getattr(self.optim, "value", self.optim)))
        for kind in self._kinds:
            kind.check(self)

    def _resolve_critic(self) -> None:
        """Set the critic's settings, and lambda if ratios are per token."""
        if self.lam is None and self.importance_sampling_level == "token":
            self.lam = PPOConfig.lam
        super()._resolve_critic()

    def _resolve_variant(self) -> None:
        """Set level and stabilizers from the variant, or an unset variant from level and stabilizers."""
        level, listed = self.importance_sampling_level, self.stabilizers
        if isinstance(self.variant, Preset):
            self.variant = str.__str__(self.variant)
            if level is not None:
                fits = [*self._fitting(level, listed), None]
                self.variant = self._BY_LEVEL.get(level) if listed is None else fits[0]
        if self.variant is None:
            self.importance_sampling_level, self.stabilizers = level or "turn", listed or []
            return
        if self.variant not in self._VARIANTS:
            raise ValueError(
                f"`variant={self.variant!r}`: allowed are {', '.join(map(repr, self._VARIANTS))}, or None; "
                f"those without a critic are STGRPOConfig's."
            )
        own_level, stabilised = self._VARIANTS[self.variant]
        level, name, expected = level or own_level, "", own_level
        if level != own_level:
            name = "importance_sampling_level"
        elif listed is not None and bool(listed) != stabilised:
            name, expected = "stabilizers", "at least one" if stabilised else "none"
        if name:
            fitting = ", ".join(map(repr, self._fitting(level, listed)))
            other = f"Choose the variant that fits: {fitting}; or set" if fitting else "Set"
            raise ValueError(
                f"`{name}={getattr(self, name)!r}` contradicts `variant={self.variant!r}`, which means "
                f"{expected!r}. {other} variant=None."
            )
        self.importance_sampling_level = level
        if listed is None:
            self.stabilizers = list(DEFAULT_STABILIZERS) if stabilised else []

    def _fitting(self, level: str, listed: list[str] | None) -> list[str]:
        """Return the variants with this level, and with stabilizers if any are listed."""
        return [
            name
            for name, (own_level, stabilised) in self._VARIANTS.items()
            if own_level == level and (listed is None or stabilised == bool(listed))
        ]

    @property
    def _kinds(self) -> list[type[Stabilizer]]:
        return [STABILIZERS[name] for name in self.stabilizers or ()]

    @property
    def scales_step(self) -> bool:
        """Return whether a stabilizer scales the learning rate of optimizer steps."""
        return any(map(scales, self._kinds))

    @property
    def has_trust_region(self) -> bool:
        """Return whether a stabilizer measures the KL of updates and takes back steps."""
        return any(kind.has_factor for kind in self._kinds)

    @property
    def needs_exact_norms(self) -> bool:
        """Return whether a stabilizer needs exact gradient norms instead of estimates."""
        return any(kind.needs_exact_norms for kind in self._kinds)

    @property
    def measures_clip_bias(self) -> bool:
        """Return whether the clipping bias is measured: always, unless no token can ever be clipped."""
        moves = self.steps_per_rollout > 1 or self.rollout_staleness > 0
        return moves or bool(self.stabilizers) or self._clip_bias_estimator is not None

    @property
    def takes_second_gradient(self) -> bool:
        """Return whether the clipping bias is measured exactly, by a second gradient, and not estimated."""
        if self._clip_bias_estimator == "exact" or self.needs_exact_norms:
            return True
        by_norms = any(kind.scale_target for kind in self._kinds)
        estimates = self.has_trust_region or any(map(weighs, self._kinds))
        return by_norms and not estimates and self._clip_bias_estimator != "logits"


def _listed(stabilizers: list[str] | str | None) -> list[str] | None:
    """Return `stabilizers` as a list without repetitions, [] for "none"; refuse unknown names."""
    if stabilizers is None:
        return None
    names = [stabilizers] if isinstance(stabilizers, str) else list(stabilizers)
    names = [] if names == ["none"] else list(dict.fromkeys(names))
    allowed = f"allowed are {', '.join(map(repr, STABILIZERS))}, any of them together, or 'none'"
    for name in names:
        if name not in STABILIZERS:
            raise ValueError(f"`stabilizers={names}`: unknown stabilizer {name!r}; {allowed}.")
    scaling = [name for name in names if STABILIZERS[name].scale_target]
    if len(scaling) > 1:
        both = " and ".join(map(repr, scaling))
        raise ValueError(f"`stabilizers={names}`: {both} scale the step. Choose one of them.")
    return names
