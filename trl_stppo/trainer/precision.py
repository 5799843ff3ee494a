"""Trained weights in half precision: does a step of the learning rate's size move them?"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .bridge import Bridge
from .engine import engine_of
from .optimizers import policy_parameters
from .ppo_config import PPOConfig

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


def unmoved(weights: Sequence[Tensor], rate: float) -> float:
    """Return the share of the weights' values, of which some are read, that a step of size `rate` leaves."""
    values = [weight.detach().flatten()[:: 1 + weight.numel() // SAMPLE] for weight in weights]
    # A model's layers may lie on several devices.
    stays = [((part.float() + rate).to(part.dtype) == part).cpu() for part in values]
    return torch.cat(stays).float().mean().item() if stays and rate else 0.0


def rounded_away(args: PPOConfig, weights: Mapping[str, Sequence[Tensor]]) -> str | None:
    """Say how many weights in bfloat16, by the field of their rate, do not move by a step; None if few."""
    found = []
    for field, every in weights.items():
        rate, narrow = getattr(args, field), [weight for weight in every if weight.dtype == torch.bfloat16]
        if (share := unmoved(narrow, rate)) >= MANY:
            found.append(
                f"a step of `{field}={rate:g}` does not move {share:.0%} of the {OWNERS[field]}'s weights, "
                f"stored in bfloat16"
            )
    return "; ".join(found) or None


def check_precision(host: Bridge) -> str | None:
    """Warn of trained weights that steps do not move, and return the facts; refuse what ends in NaN."""
    engine = engine_of(host.accelerator)
    policy = engine.stepped([p for _, p in policy_parameters(host.model, host.critic)])
    critic = engine.stepped(host.critic.parameters())
    if any(weight.dtype == torch.float16 for weight in (*policy, *critic)):
        raise ValueError(
            "`model` or `value_model` has trained weights in float16, in which Adam's eps is 0; allowed are "
            "float32 and bfloat16."
        )
    facts = rounded_away(host.args, {"learning_rate": policy, "critic_learning_rate": critic})
    if facts is not None:
        logger.warning("Rounding: %s. %s", facts, WAYS_OUT)
    return facts
