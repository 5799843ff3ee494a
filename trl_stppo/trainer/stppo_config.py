"""Settings of `STPPOTrainer`: PPOConfig with turn-level ratios and stabilizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..core import TOKEN_CLIPRANGE
from .options import option, takes_ignored
from .ppo_config import PPOConfig
from .stabilizers import STABILIZERS, Stabilizer, check_linear, scales

# Stabilizers of a stabilised variant. "winners" is not a default, because it converges too early if the
# policy has not found a way to play yet (docs/algorithm.md).
DEFAULT_STABILIZERS = ("trust_region", "share")
# Variant -> its (importance_sampling_level, whether its updates are stabilised).
VARIANTS: dict[str, tuple[str, bool]] = {
    **{"ppo": ("token", False), "turn-ppo": ("turn", False)},
    **{"s-ppo": ("token", True), "st-ppo": ("turn", True)},
}


@takes_ignored
@dataclass(repr=False)
class STPPOConfig(PPOConfig):
    """Configuration of [`STPPOTrainer`]: [`PPOConfig`] with turn-level ratios and stabilizers.

    `variant` sets `importance_sampling_level` and `stabilizers`; setting one of them to a value
    that contradicts the variant is an error. Without a variant they select it.

    Source: arXiv:2511.20718v1, Sections 4 and 5; the signals of `"share"` and `"winners"`
    are this package's own. VCPO (arXiv:2602.17616) scales the step too, as `"share"`
    does.
    """

    trainer_name: ClassVar[str] = "STPPOTrainer"
    _VALID_LEVELS: ClassVar[tuple[str, ...]] = ("token", "turn", "sequence")
    _VARIANTS: ClassVar[Mapping[str, tuple[str, bool]]] = VARIANTS

    variant: str | None = option(
        None,
        f"One of {', '.join(VARIANTS)}. Default the one that fits the level; without it st-ppo.",
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
    stabilizers: list[str] | None = option(  # type: ignore[misc, assignment]
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
        self.scales_step = any(map(scales, self._kinds))
        moves = self.steps_per_rollout > 1 or self.rollout_staleness > 0
        self.measures_clip_bias = moves or bool(self.stabilizers)
        self.takes_second_gradient = any(kind.needs_exact_norms for kind in self._kinds)
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
        level, listed = self.importance_sampling_level or "turn", self.stabilizers
        if self.variant is None:
            fitting = [(level, on) for on in (True, False) if listed is None or on == bool(listed)]
            named = (name for f in fitting for name, own in self._VARIANTS.items() if own == f)
            self.variant = next(named, None)
        if self.variant is None:
            self.importance_sampling_level, self.stabilizers = level, listed or []
            return
        if self.variant not in self._VARIANTS:
            raise ValueError(
                f"`variant={self.variant!r}`: allowed are {', '.join(map(repr, self._VARIANTS))}; "
                f"those without a critic are STGRPOConfig's."
            )
        self._take_variant(*self._VARIANTS[self.variant])

    def _take_variant(self, level: str, stabilised: bool) -> None:
        """Set level and stabilizers; refuse values that contradict the variant."""
        name, expected = "", ""
        if self.importance_sampling_level not in (None, level):
            name, expected = "importance_sampling_level", repr(level)
        elif self.stabilizers is not None and bool(self.stabilizers) != stabilised:
            name, expected = "stabilizers", "at least one" if stabilised else "none"
        if name:
            raise ValueError(
                f"`{name}={getattr(self, name)!r}` contradicts `variant={self.variant!r}`, which means "
                f"{expected}. Leave one of them out."
            )
        self.importance_sampling_level = level
        if self.stabilizers is None:
            self.stabilizers = list(DEFAULT_STABILIZERS) if stabilised else []

    @property
    def _kinds(self) -> list[type[Stabilizer]]:
        return [STABILIZERS[name] for name in self.stabilizers or ()]


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
