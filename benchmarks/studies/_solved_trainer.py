"""Prototypes: STPPOTrainer with each suspected cure of a fall after the task is solved.

An arm is named by its parts, joined by `+`, on turn ratios; a number belongs to what stands before it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from _stability_grid import FIGURES as STABILITY_FIGURES
from torch import Tensor

from trl_stppo import STPPOTrainer
from trl_stppo.core import normalization_scale
from trl_stppo.trainer.batch import Batch, Targets
from trl_stppo.trainer.stabilizers import STABILIZERS, STEP, Stabilizer, register
from trl_stppo.trainer.training_loop import TrainingLoop

PARTS = {  # part -> what it changes
    "turn": "nothing: the ratio alone",
    "share": "the step, by (g / (g + C))^4 of exact norms",
    "logits": "these norms are estimated",
    "winners": "which episodes train",
    "memory": "the norms of share are running means with this factor",
    "least": "the scale is the smaller one of both shares, with this factor",
    "beta2": "AdamW's factor of squares",
    "delta": "the largest ratio of a term with a negative advantage",
    "clip": "max_grad_norm is this multiple of the gradient's running mean norm",
    "kl": "target_kl, without taking a step back",
    "undo": "target_kl, and the last step before it is taken back",
    "spread": "advantages are divided by a running spread with this factor, in place of whitening",
}
FIGURES = (*STABILITY_FIGURES, "study/scale", "study/undone", "advantage/std", "policy/turn_ess")


def parts_of(arm: str) -> dict[str, float | None]:
    """Parts and their numbers.

    Raises:
        ValueError: there is no such part.
    """
    parts: dict[str, float | None] = {}
    for word in arm.split("+"):
        name, _, number = word.partition("-")
        if name not in PARTS:
            raise ValueError(f"{arm!r}: {name!r} is not a part; parts are {sorted(PARTS)}")
        parts[name] = float(number) if number else None
    return parts


def settings_of(arm: str) -> dict[str, Any]:
    """Settings of the trainer's own that the parts change."""
    parts = parts_of(arm)
    names = [name for name in ("winners", "share") if name in parts]
    for kind in (Memory, Least):
        if (factor := parts.get(kind.name)) is not None:
            names[names.index("share")] = with_factor(kind, factor)
    estimated = "logits" in parts or "winners" in parts
    return {
        "stabilizers": names or "none",
        "clip_bias_estimator": ("logits" if estimated else "exact") if "share" in parts else None,
        "adam_beta2": parts.get("beta2", 0.999),
        "delta": parts.get("delta"),
        "target_kl": parts.get("kl", parts.get("undo")),
        "whiten_advantages": "spread" not in parts,
        "lr_scheduler_type": "linear",
    }


class Memory(Stabilizer):
    """`share` of norms that are running means over steps."""

    name, meaning, scale_target = "memory", "scales the step by a share of running norms", STEP
    factor = 0.9

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._norms = [0.0, 0.0]

    def scale(self, kept_norm: Tensor, clipped_norm: Tensor) -> float:
        """Of the running norms."""
        pairs = zip(self._norms, map(float, (kept_norm, clipped_norm)), strict=True)
        self._norms = [self.factor * mean + (1 - self.factor) * norm for mean, norm in pairs]
        return normalization_scale(*self._norms, "share", self.config.clip_bias_power)


class Least(Memory):
    """The smaller one of both shares."""

    name, meaning = "least", "scales the step by the smaller share, of its norms or of running ones"

    def scale(self, kept_norm: Tensor, clipped_norm: Tensor) -> float:
        """The smaller one."""
        momentary = normalization_scale(
            kept_norm, clipped_norm, "share", self.config.clip_bias_power
        )
        return min(super().scale(kept_norm, clipped_norm), float(momentary))


def with_factor(kind: type[Memory], factor: float) -> str:
    """The name under which a kind is registered with a factor of its own."""
    name = f"{kind.name}-{factor}"
    if name not in STABILIZERS:
        register(type(kind.__name__, (kind,), {"name": name, "factor": factor}))
    return name


class SolvedLoop(TrainingLoop):
    """The training loop with an arm's parts, which the trainer names."""

    def __init__(self, host: Any, *args: Any, **parts: Any) -> None:
        super().__init__(host, *args, **parts)
        self._arm = host.arm
        self._mean_norm, self._square = 0.0, None  # type: ignore[var-annotated]

    def _before_step(self) -> None:
        """Limits the gradient's norm as the arm says."""
        super()._before_step()
        metrics = self.metrics
        if {"memory", "least"} & set(self._arm):
            metrics.add_scalar("study/scale", metrics._scalars["clip_bias/scale"])
        if (multiple := self._arm.get("clip")) is not None:
            norm = float(metrics._scalars.get("clip_bias/grad_norm") or 0.0)
            if self._mean_norm:
                self.args.max_grad_norm = min(1.0, multiple * self._mean_norm)
            self._mean_norm = 0.9 * self._mean_norm + 0.1 * norm if self._mean_norm else norm

    def targets(self, batch: Batch, *args: Any) -> Targets:
        """Divided by a running spread, if the arm says so."""
        first = super().targets(batch, *args)
        factor = self._arm.get("spread")
        if factor is None:
            return first
        mask = batch["loss_mask"]
        square = float(first.raw_advantages[mask].square().mean())
        self._square = (
            square if self._square is None else factor * self._square + (1 - factor) * square
        )
        scaled = first.raw_advantages / (self._square**0.5 + 1e-8)
        return Targets(**{**vars(first), "advantages": scaled.masked_fill(~mask, 0.0)})


class SolvedTrainer(STPPOTrainer):
    """STPPOTrainer with an arm's parts."""

    loop_class = SolvedLoop

    def __init__(self, *args: Any, arm: str, **kwargs: Any) -> None:
        self.arm = parts_of(arm)
        self._snapshot: list[tuple[Tensor, Tensor, dict[str, Any]]] | None = None
        super().__init__(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As ever; keeps the weights and moments from before each step, and goes back to them."""
        loss = super().training_step(*args, **kwargs)
        if "undo" not in self.arm or not self.accelerator.sync_gradients:
            return loss
        assert self.optimizer is not None
        state = getattr(self.optimizer, "optimizer", self.optimizer).state
        policy = [p for p in self.model.parameters() if p.requires_grad]
        if self._guards.verdict == "taken":
            self._snapshot = [
                (p, p.detach().clone(), copy.deepcopy(dict(state.get(p, {})))) for p in policy
            ]
        elif self._snapshot is not None:
            with torch.no_grad():
                for parameter, value, moments in self._snapshot:
                    parameter.copy_(value)
                    state[parameter] = moments
            self._snapshot = None
            self._rollout_log.add({"study/undone": 1.0})
        return loss
