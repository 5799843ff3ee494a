"""Trained weights in half precision: does a step of the learning rate's size move them?"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .bridge import Bridge
from .engine import engine_of
from .optimizers import policy_parameters

logger = logging.getLogger(__name__)
# Number of values that are read of each tensor.
SAMPLE = 4096
# Smallest share of unmoved weights to warn of.
MANY = 0.1
OWNERS = {"learning_rate": "policy", "critic_learning_rate": "critic"}
WAYS_OUT = (
    "Such a step is below half the distance to the next number. Adam's steps have about this size, SGD's are "
    "mostly smaller. Load float32 weights (`dtype: float32`) and set `bf16: true`, or train LoRA, whose "
    "adapters are float32."
)


def _sampled(weight: Tensor) -> Tensor:
    """Return a copy of evenly spaced values of a tensor."""
    return weight.detach().flatten()[:: 1 + weight.numel() // SAMPLE].clone()


def _share(weights: Sequence[Tensor], flags: Sequence[Tensor]) -> float:
    """Return the share of the weights' values whose flags are set, estimated from the sampled values."""
    sums = [w.numel() * float(flag.float().mean()) for w, flag in zip(weights, flags, strict=True)]
    return sum(sums) / sum(w.numel() for w in weights)


def rounded_away(rated: Mapping[str, Sequence[tuple[Tensor, float]]]) -> str | None:
    """Describe how many weights in half precision steps of their rates' sizes do not move; None if few.

    `rated` has weights and their rates, by the field that sets the rate.
    """
    found = []
    for field, pairs in rated.items():
        weights = [weight for weight, _ in pairs]
        kinds = {str(w.dtype).removeprefix("torch.") for w in weights if w.dtype.itemsize == 2}
        stays = [(_sampled(w).float() + rate).to(w.dtype) == _sampled(w) for w, rate in pairs if kinds]
        if stays and any(rate for _, rate in pairs) and (share := _share(weights, stays)) >= MANY:
            found.append(
                f"a step of `{field}={pairs[0][1]:g}` does not move {share:.0%} of the {OWNERS[field]}'s "
                f"weights, stored in {' and '.join(sorted(kinds))}"
            )
    return "; ".join(found) or None


def check_precision(host: Bridge) -> str | None:
    """Warn of trained weights that steps do not move, and describe them; refuse settings that end in NaN."""
    args, optimizer, engine = host.args, host.optimizer, engine_of(host.accelerator)
    policy = engine.stepped([p for _, p in policy_parameters(host.model, host.critic)])
    critic = engine.stepped(host.critic.parameters())
    groups = optimizer.param_groups if optimizer else []
    rates = {id(weight): group["lr"] or 0.0 for group in groups for weight in group["params"]}
    parts = {"learning_rate": policy, "critic_learning_rate": critic}
    rated = {f: [(w, rates.get(id(w), getattr(args, f))) for w in parts[f]] for f in parts}
    if any(weight.dtype == torch.float16 for weight in (*policy, *critic)):
        raise ValueError(
            "`model` or `value_model` has trained weights in float16, in which Adam's eps is 0; allowed are "
            "float32 and bfloat16."
        )
    if (facts := rounded_away(rated)) is not None:
        logger.warning("Rounding: %s. %s", facts, WAYS_OUT)
    return facts
