"""Arms of `region.toml`: the trust region without one of its parts, or with another growth."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trl_stppo import STGRPOTrainer, STPPOTrainer
from trl_stppo.core import normalization_scale
from trl_stppo.core.trust_region import GROWTH
from trl_stppo.trainer.stabilizers import STEP, Stabilizer, TrustRegion, register


@register
class Flat(TrustRegion):
    """The allowed KL is the same in all updates."""

    name, exponent = "region-flat", 0.0


@register
class Kept(TrustRegion):
    """A step that is too large shortens later steps, and is not taken back."""

    name, restores = "region-kept", False


@register
class Blind(TrustRegion):
    """Nothing measures the last step of an update."""

    name, looks = "region-blind", False


@register
class Fast(TrustRegion):
    """The factor grows by up to four where the KL is far below the allowed KL."""

    name, growth = "region-fast", 4.0


@register
class Low(TrustRegion):
    """The learning rate is the bound of all steps."""

    name, largest_factor = "region-low", 1.0


@register
class Plain(Kept):
    """Neither a step is taken back nor the last step measured."""

    name, looks = "region-plain", False


@register
class Secant(Plain):
    """Far below the allowed KL the factor grows by up to four, to half of what the KL allows."""

    name = "region-secant"

    def end_update(self) -> None:
        """Set the largest growth, then move the factor."""
        kl, turns = self._seen
        state = self.state
        measured = state.measured + turns * kl / self.allowed_kl
        ratio = max(measured / max(state.turns + turns, 1.0), 1e-6)
        self.growth = max(GROWTH, min(4.0, 0.5 * ratio**-0.5))
        super().end_update()


@register
class Start(Plain):
    """As `region-secant` up to the first update that comes near the allowed KL; then growth is as usual."""

    name = "region-start"
    starts = True

    def end_update(self) -> None:
        """Set the largest growth, then move the factor."""
        kl, turns = self._seen
        state = self.state
        measured = state.measured + turns * kl / self.allowed_kl
        ratio = max(measured / max(state.turns + turns, 1.0), 1e-6)
        jump = min(10.0, 0.5 * ratio**-0.5)
        self.starts = self.starts and self._may_grow and jump > GROWTH
        self.growth = jump if self.starts else GROWTH
        super().end_update()


@register
class StartLow(Start):
    """The same, and the learning rate is the bound of all steps."""

    name, largest_factor = "region-start-low", 1.0


@register
class StartLowBack(StartLow):
    """The same, and a step that is too large is taken back, also the last one of an update."""

    name, restores, looks = "region-start-low-back", True, True


@register
class SecantLow(Secant):
    """The same, and the learning rate is the bound of all steps."""

    name, largest_factor = "region-secant-low", 1.0


@register
class ShareOnce(Stabilizer):
    """`share` with power 1."""

    name, meaning, scale_target = "share-1", "scales the step by the share", STEP

    def scale(self, kept_norm: Tensor, clipped_norm: Tensor) -> Tensor:
        """Return the share."""
        return normalization_scale(kept_norm, clipped_norm, "share", 1.0)


class Estimated(STPPOTrainer):
    """STPPOTrainer with estimated norms, and with the stabilizers of this file."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["args"].measure_clip_bias("logits")
        super().__init__(*args, **kwargs)


class Groups(STGRPOTrainer):
    """STGRPOTrainer, with the stabilizers of this file."""
