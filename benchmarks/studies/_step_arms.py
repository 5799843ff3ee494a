"""Arms of `step.toml`: the stabilizer "kl" with other growth, shares of running norms, other advantages."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from trl_stppo import STPPOTrainer
from trl_stppo.core import normalization_scale
from trl_stppo.models.critic import Critic, scalar_head
from trl_stppo.trainer.batch import Batch, Targets
from trl_stppo.trainer.setup import models
from trl_stppo.trainer.stabilizers import STEP, Stabilizer, register
from trl_stppo.trainer.stabilizers.kl import Kl
from trl_stppo.trainer.training_loop import TrainingLoop

# Deviations beyond which an advantage is cut off.
BOUND = 3.0


@register
class Threshold(Kl):
    """`kl` that grows slowly above 0.7 of the factor at which it was last lowered."""

    name = "kl-threshold"
    lowered_at = float("inf")

    def end_step(self, *, taken: bool, clip_fraction: float) -> None:
        """Count the mini-batch; after the update's last mini-batch, move the factor."""
        before = self.factor
        super().end_step(taken=taken, clip_fraction=clip_fraction)
        if self.factor < before:
            self.lowered_at = before
        elif before > 0.7 * self.lowered_at:
            self.factor = min(self.factor, before * 1.02)


@register
class Least(Stabilizer):
    """The smaller one of `share` and of the share of running norms, to a power."""

    name, meaning, scale_target = "least", "scales the step by the smaller share", STEP
    power, memory = 4.0, 0.9

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._norms = [0.0, 0.0]

    def scale(self, kept_norm: Tensor, clipped_norm: Tensor) -> float:
        """Return the smaller share."""
        pairs = zip(self._norms, map(float, (kept_norm, clipped_norm)), strict=True)
        self._norms = [self.memory * mean + (1 - self.memory) * norm for mean, norm in pairs]
        kept, clipped = map(torch.tensor, self._norms)
        shares = [
            normalization_scale(*norms, "share", self.power)
            for norms in ((kept, clipped), (kept_norm, clipped_norm))
        ]
        return min(map(float, shares))


@register
class LeastSquared(Least):
    """`least` with power 2."""

    name, power = "least-2", 2.0


@register
class LeastOnce(Least):
    """`least` with power 1."""

    name, power = "least-1", 1.0


@register
class ShareOnce(Stabilizer):
    """`share` with power 1."""

    name, meaning, scale_target = "share-1", "scales the step by the share", STEP

    def scale(self, kept_norm: Tensor, clipped_norm: Tensor) -> Tensor:
        """Return the share."""
        return normalization_scale(kept_norm, clipped_norm, "share", 1.0)


class OtherAdvantages(TrainingLoop):
    """The training loop with advantages that `change` makes of the raw and the whitened ones."""

    def change(self, raw: Tensor, whitened: Tensor) -> Tensor:
        """Return the advantages, [B, T]."""
        raise NotImplementedError

    def targets(self, batch: Batch, *args: Any) -> Targets:
        """Return the targets with other advantages."""
        first = super().targets(batch, *args)
        changed = self.change(first.raw_advantages, first.advantages)
        changed = changed.masked_fill(~batch["loss_mask"], 0.0)
        return Targets(**{**vars(first), "advantages": changed})


class RawLoop(OtherAdvantages):
    """Advantages are not whitened."""

    def change(self, raw: Tensor, whitened: Tensor) -> Tensor:
        """Return the raw advantages."""
        return raw


class BoundedLoop(OtherAdvantages):
    """Whitened advantages are bounded."""

    def change(self, raw: Tensor, whitened: Tensor) -> Tensor:
        """Return the whitened advantages within three deviations."""
        return whitened.clamp(-BOUND, BOUND)


class Raw(STPPOTrainer):
    """STPPOTrainer without whitened advantages."""

    loop_class = RawLoop


class Bounded(STPPOTrainer):
    """STPPOTrainer with bounded advantages."""

    loop_class = BoundedLoop


class Standard(STPPOTrainer):
    """STPPOTrainer, with the stabilizers of this file."""


class HeadCritic(Critic):
    """A value head on the policy's own features, which it does not train: a value takes no backward pass."""

    def __init__(self, policy: Any) -> None:
        self.model = self._base = policy
        like = policy.get_input_embeddings().weight
        self.head = scalar_head(policy.config.hidden_size, like=like)

    def hidden_states(self, *args: Any) -> Tensor:
        """Return the policy's last hidden states without a graph, [B, P + T, H]."""
        with torch.no_grad():
            return super().hidden_states(*args)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the head's parameters."""
        return list(self.head.parameters())


class Head(STPPOTrainer):
    """STPPOTrainer whose critic is a head on the policy's features."""

    def _build_models(self, run: Any) -> None:
        with patch.object(models, "build_critic", lambda host, given: HeadCritic(host.model)):
            super()._build_models(run)
