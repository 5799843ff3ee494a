"""The interface of a stabilizer, and the registry of all of them."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..gradient_buffer import Reduce

# Optimizers whose step is proportional to the learning rate, so that scaling the rate scales the step.
LINEAR_OPTIMIZERS = ("adam", "adafactor", "sgd", "adagrad", "rmsprop", "lion", "ademamix")
# Optimizers that are not linear although some are named alike: their state depends on the learning rate, or
# they step within the backward pass.
NONLINEAR_OPTIMIZERS = (
    *("schedulefree", "layerwise", "lomo", "galore", "apollo"),
    *("asgd", "dadapt"),
)
STEP, GRADIENT = "step", "gradient"


class Stabilizer:
    """One entry of `stabilizers`: it weighs episodes, scales optimizer steps, or both.

    For each mini-batch the loop calls `start_mini_batch`; for each pass of the loss `episode_weights` and
    `observe`; then `before_step`, `scale` if it scales, and `end_step`.

    An instance belongs to one run. Its state between steps goes into `state_dict`.

    Args:
        config: the run's `STPPOConfig`.

    Attributes:
        name: entry in `stabilizers`.
        meaning: one clause for `--help_all` and docs/algorithm.md.
        scale_target: what `scale` multiplies: "step" (the policy's learning rate in one step), "gradient"
            (Adam cancels a constant factor on the gradient), or None.
        needs_exact_norms: whether estimated norms are refused; sharded gradients are then refused too.
    """

    name: ClassVar[str] = ""
    meaning: ClassVar[str] = ""
    scale_target: ClassVar[str | None] = None
    needs_exact_norms: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    def check(cls, config: Any) -> None:
        """Raise ValueError if the configuration does not allow this stabilizer."""

    def episode_weights(self, advantages: Tensor, loss_mask: Tensor) -> Tensor:
        """Return constant factors on the kept terms of the policy's loss, [B].

        Args:
            advantages: [B, T].
            loss_mask: [B, T] bool, True = counts.
        """
        raise NotImplementedError

    def scale(self, kept_norm: Tensor, clipped_norm: Tensor) -> Tensor | float:
        """Return the factor on an optimizer step, equal on all processes.

        Args:
            kept_norm: [], norm of the gradient of the terms that the clip keeps.
            clipped_norm: [], norm of the gradient of the terms that the clip removes, in the same unit.
        """
        raise NotImplementedError

    def start_mini_batch(self, step: int) -> None:
        """Prepare for a mini-batch; `step` counts the optimizer steps of its rollout batch from 0."""

    def observe(
        self, logprobs: Tensor, old_logprobs: Tensor, turn_index: Tensor, loss_mask: Tensor
    ) -> None:
        """Measure a pass of the policy's loss.

        Args:
            logprobs: [B, T] nats.
            old_logprobs: [B, T] nats, log-probabilities of the policy that played.
            turn_index: [B, T] int64, -1 outside turns.
            loss_mask: [B, T] bool, True = counts.
        """

    def before_step(self, reduce: Reduce, device: torch.device) -> tuple[float, dict[str, float]]:
        """Return a factor on the optimizer step, equal on all processes, and metrics by name.

        It is called before the last backward pass of a mini-batch. `reduce` sums over processes.
        """
        return 1.0, {}

    def end_step(self, *, taken: bool, clip_fraction: float) -> None:
        """End a mini-batch.

        Args:
            taken: whether the policy has stepped.
            clip_fraction: share of tokens whose terms the clip removed.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the stabilizer's state as plain data for checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the stabilizer's state from a `state_dict`."""


Kind = TypeVar("Kind", bound=type[Stabilizer])
STABILIZERS: dict[str, type[Stabilizer]] = {}


def weighs(kind: type[Stabilizer]) -> bool:
    """Return whether a stabilizer weighs episodes."""
    return kind.episode_weights is not Stabilizer.episode_weights


def scales(kind: type[Stabilizer]) -> bool:
    """Return whether a stabilizer scales optimizer steps."""
    return kind.scale_target == STEP or kind.before_step is not Stabilizer.before_step


def register(kind: Kind) -> Kind:
    """Register a stabilizer class, so that `stabilizers` may name it.

    Raises:
        TypeError: the class is incomplete, or another stabilizer has its name.
    """
    has_scale = kind.scale is not Stabilizer.scale
    problems = {
        "needs a `name` and a `meaning`": not (kind.name and kind.meaning),
        f"has the name {kind.name!r} of another one": kind.name in (*STABILIZERS, "none"),
        "overrides none of `episode_weights`, `scale` and `before_step`": (
            not (weighs(kind) or has_scale or scales(kind))
        ),
        "needs both, `scale` and `scale_target` ('step' or 'gradient'), or neither": (
            has_scale != (kind.scale_target in (STEP, GRADIENT))
        ),
    }
    for problem, found in problems.items():
        if found:
            raise TypeError(f"The stabilizer {kind.__name__} {problem}.")
    STABILIZERS[kind.name] = kind
    return kind


def check_linear(optimizer: str) -> None:
    """Refuse an optimizer whose step is not proportional to its learning rate."""
    name = optimizer.lower().replace("_", "")
    linear = any(part in name for part in LINEAR_OPTIMIZERS)
    if not linear or any(part in name for part in NONLINEAR_OPTIMIZERS):
        raise ValueError(
            f"`optim`: {optimizer!r} is not supported by `stabilizers` that scale steps: its step is not "
            f"known to be proportional to its learning rate. Use a variant of AdamW, SGD or Adafactor."
        )
