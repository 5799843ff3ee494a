"""Trained weights in half precision: does a step of the learning rate's size move them?"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerState

from .bridge import Bridge
from .engine import engine_of
from .optimizers import policy_parameters
from .sharding.runtime import is_in_pieces

logger = logging.getLogger(__name__)
# Number of values that are read of each tensor.
SAMPLE = 4096
# Smallest share of unmoved weights to warn of.
MANY = 0.1
MOVED = "policy/moved_share"
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
    """Return the share of the weights' values whose flags are set; only sampled values have a flag."""
    sums = [w.numel() * float(flag.float().mean()) for w, flag in zip(weights, flags, strict=True)]
    return sum(sums) / sum(w.numel() for w in weights)


def rounded_away(rated: Mapping[str, Sequence[tuple[Tensor, float]]]) -> str | None:
    """Say how many weights in half precision do not move by steps of their rates' sizes; None if few.

    `rated` has weights and their rates, by the field that sets the rate.
    """
    found = []
    for field, pairs in rated.items():
        weights = [weight for weight, _ in pairs]
        kinds = {str(w.dtype).removeprefix("torch.") for w in weights if w.dtype.itemsize == 2}
        stays = [
            (_sampled(w).float() + rate).to(w.dtype) == _sampled(w) for w, rate in pairs if kinds
        ]
        if stays and any(rate for _, rate in pairs) and (share := _share(weights, stays)) >= MANY:
            found.append(
                f"a step of `{field}={pairs[0][1]:g}` does not move {share:.0%} of the {OWNERS[field]}'s "
                f"weights, stored in {' and '.join(sorted(kinds))}"
            )
    return "; ".join(found) or None


def check_precision(host: Bridge) -> str | None:
    """Warn of trained weights that steps do not move, and return the facts; refuse what ends in NaN."""
    args, optimizer, engine = host.args, host.optimizer, engine_of(host.accelerator)
    policy = engine.stepped([p for _, p in policy_parameters(host.model, host.critic)])
    critic = engine.stepped(host.critic.parameters())
    groups = optimizer.param_groups if optimizer else []
    rates = {id(weight): group["lr"] or 0.0 for group in groups for weight in group["params"]}
    parts = {"learning_rate": policy, "critic_learning_rate": critic}
    rated = {f: [(w, rates.get(id(w), getattr(args, f))) for w in parts[f]] for f in parts}
    if halves := [weight for weight in (*policy, *critic) if weight.dtype == torch.float16]:
        kind, options = host.get_optimizer_cls_and_kwargs(args, host.model)
        _check_eps(optimizer or kind(halves, **options), "optimizers" if optimizer else "optim")
    if (facts := rounded_away(rated)) is not None:
        logger.warning("Rounding: %s. %s", facts, WAYS_OUT)
    return facts


def _check_eps(optimizer: Optimizer, field: str) -> None:
    """Refuse an optimizer that divides in float16 by an eps that is 0 there."""
    name = type(optimizer).__name__
    field = "adam_epsilon" if field == "optim" and "Adam" in name else field
    for group in optimizer.param_groups:
        eps, narrow = group.get("eps"), any(w.dtype == torch.float16 for w in group["params"])
        # A fused step computes in float32, and so do the optimizers of other packages.
        narrow &= type(optimizer).__module__.startswith("torch.optim") and not group.get("fused")
        if narrow and isinstance(eps, float) and not torch.tensor(eps, dtype=torch.float16):
            raise ValueError(
                f"`{field}`: {name} has eps={eps:g}, which is 0 in float16, the dtype of trained "
                f"weights. Load them in float32, or set 1e-07 or more."
            )


class MovedWeights(TrainerCallback):
    """Logs once, after the first step that has a gradient and a rate, which share of its weights moved."""

    def __init__(self, host: Bridge) -> None:
        self._host, self._metrics = host, host.next_metrics["train"]
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        self._done = False

    def on_pre_optimizer_step(
        self, _: object, state: TrainerState, *__: object, optimizer: Optimizer, **kwargs: object
    ) -> None:
        """Keep some values of each of the policy's weights that has a gradient."""
        known = [] if self._done else [self._metrics, *state.log_history]
        self._done |= any(MOVED in entry for entry in known)
        if not self._done and optimizer.param_groups[0]["lr"]:
            named = policy_parameters(self._host.model, self._host.critic)
            whole = [w for _, w in named if not is_in_pieces(w)]
            pulled = [(w, _sampled(w.grad) != 0) for w in whole if w.grad is not None]
            self._before = [(w, _sampled(w), flags) for w, flags in pulled if flags.any()]

    def on_step_end(self, *_: object, **kwargs: object) -> None:
        """Compare the values after the step."""
        if self._before:
            weights, _, pulled = zip(*self._before, strict=True)
            moved = [(_sampled(w) != before) & flags for w, before, flags in self._before]
            self._metrics[MOVED] += [_share(weights, moved) / _share(weights, pulled)]
            self._before = []
