"""Limits that a collapsing run misses, and for how long it may."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from .ppo_config import PPOConfig

logger = logging.getLogger(__name__)

# Field -> the metric of the rollout batch that it is a lower limit of.
ROLLOUT_LIMITS = {
    "min_valid_action_rate": "turns/valid_action_rate",
    "min_reward_std": "reward_std",
}
CLIP_BIAS_LIMIT = "max_clip_bias_ratio"


class CollapseWatch:
    """Counts how often in a row a run has missed each of its limits.

    Args:
        args: the limits; None switches one off.

    Attributes:
        strikes: by field, plain numbers for a checkpoint.
    """

    def __init__(self, args: PPOConfig) -> None:
        self._args = args
        self._said: set[str] = set()
        self.strikes: dict[str, int] = {}

    def rollout(self, figures: Mapping[str, Sequence[float]], step: int) -> str | None:
        """Look at a new rollout batch.

        Args:
            figures: metrics as lists, the newest value last.
            step: the optimizer step that comes after it, for the message.

        Returns:
            Why the run is to stop; None while it may go on.
        """
        verdict = None
        for field, metric in ROLLOUT_LIMITS.items():
            limit, values = getattr(self._args, field), figures.get(metric)
            if limit is None:
                continue
            if not values:
                if field not in self._said:
                    logger.warning("`%s` watches nothing: this run has no %r.", field, metric)
                self._said.add(field)
            elif not math.isnan(values[-1]):
                value, where = values[-1], f"{metric} at step {step}"
                found = self._count(field, value, limit, value < limit, where, "rollout batches")
                verdict = verdict or found
        return verdict

    def mini_batch(self, figures: Mapping[str, float], step: int) -> str | None:
        """Look at an optimizer step; arguments and result as in `rollout`."""
        limit = getattr(self._args, CLIP_BIAS_LIMIT, None)
        if limit is None or "clip_bias/norm" not in figures:
            return None
        bias, kept = figures["clip_bias/norm"], figures["clip_bias/grad_norm"]
        ratio = bias / kept if kept > 0 else math.inf if bias > 0 else 0.0
        where = f"clip_bias/norm over clip_bias/grad_norm at step {step}"
        return self._count(CLIP_BIAS_LIMIT, ratio, limit, ratio > limit, where, "optimizer steps")

    def _count(
        self, field: str, value: float, limit: float, missed: bool, where: str, unit: str
    ) -> str | None:
        self.strikes[field] = self.strikes.get(field, 0) + 1 if missed else 0
        patience = self._args.collapse_patience
        if self.strikes[field] < patience:
            return None
        return (
            f"`{field}={limit}` was missed {patience} {unit} in a row (`collapse_patience`); the last "
            f"value is {value:.4g}, {where}"
        )
