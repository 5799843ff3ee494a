"""The interface of a stabilizer, and the registry of all stabilizers."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from torch import Tensor

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

    An instance belongs to one run. Its state between steps goes into `state_dict`.

    Args:
        config: the run's `STPPOConfig`.

    Attributes:
        name: entry in `stabilizers`.
        meaning: one clause for `--help` and docs/algorithm.md.
        scale_target: what `scale` multiplies: "step" (the policy's learning rate in one step), "gradient"
            (Adam cancels a constant factor on the gradient), or None.
        needs_exact_norms: whether estimated norms are refused; sharded gradients are then refused too.
        has_factor: whether it has a factor of its own on optimizer steps, as `TrustRegion` has.
    """

    name: ClassVar[str] = ""
    meaning: ClassVar[str] = ""
    scale_target: ClassVar[str | None] = None
    needs_exact_norms: ClassVar[bool] = False
    has_factor: ClassVar[bool] = False

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

    def state_dict(self) -> dict[str, Any]:
        """Return the stabilizer's state as plain data for checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the stabilizer's state from a `state_dict`; {} stands for a new run."""


Kind = TypeVar("Kind", bound=type[Stabilizer])
STABILIZERS: dict[str, type[Stabilizer]] = {}


def weighs(kind: type[Stabilizer]) -> bool:
    """Return whether a stabilizer weighs episodes."""
    return kind.episode_weights is not Stabilizer.episode_weights


def scales(kind: type[Stabilizer]) -> bool:
    """Return whether a stabilizer scales optimizer steps."""
    return kind.scale_target == STEP or kind.has_factor


def register(kind: Kind) -> Kind:
    """Register a stabilizer class, so that `stabilizers` may name it.

    Raises:
        TypeError: the class is incomplete, or another stabilizer has its name.
    """
    has_scale = kind.scale is not Stabilizer.scale
    problems = {
        "needs a `name` and a `meaning`": not (kind.name and kind.meaning),
        f"has the name {kind.name!r} of another one": kind.name in (*STABILIZERS, "none"),
        "overrides neither `episode_weights` nor `scale`, and has no factor": (
            not (weighs(kind) or has_scale or scales(kind))
        ),
        "scales the gradient, which an estimate comes too late for: set `needs_exact_norms`": (
            kind.scale_target == GRADIENT and not kind.needs_exact_norms
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
