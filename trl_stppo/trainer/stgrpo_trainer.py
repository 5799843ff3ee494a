"""ST-GRPO: the two pieces of ST-PPO on group-relative advantages, without a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import group_advantages
from ..rollout.batch import TurnBatch
from .estimate import Estimates
from .forward import Batch
from .stgrpo_config import STGRPOConfig
from .stppo_trainer import STPPOTrainer


class STGRPOTrainer(STPPOTrainer):
    """Group-relative policy optimisation for multi-turn agents, with turn ratios and the correction.

    Takes `STPPOTrainer`'s arguments, less `value_model`, with an [`STGRPOConfig`]; environments, turn
    rewards, guards, checkpoints and engines are the same. An episode's advantage is its score, turn
    rewards included, relative to the other episodes of its prompt; one that failed is left out of its
    group. `variant="grpo"` is GRPO, and `"gspo"` takes one ratio per episode.

    Source: Li et al., arXiv:2511.20718v2, where it is called SO-GRPO.
    """

    config_class = STGRPOConfig
    has_critic = False
    _tag_names = ["trl", "stgrpo", "reinforcement-learning", "multi-turn"]  # noqa: RUF012
    _name = "ST-GRPO"

    def _advantages(
        self, batch: Batch, turns: TurnBatch, scores: Tensor, kl: Tensor | None
    ) -> Estimates:
        """The same advantage for all tokens of an episode."""
        if turns.turn_rewards is not None:
            scores = scores + turns.turn_rewards.sum(dim=1)
        mask = batch["loss_mask"]
        counts = mask.any(dim=1)
        first = self.accelerator.process_index * len(scores)
        groups = (-1, self.num_generations)
        relative = group_advantages(
            self.accelerator.gather(scores).view(groups),
            self.accelerator.gather(counts).view(groups),
            self.args.scale_rewards,
        ).flatten()
        advantages = relative[first : first + len(scores), None] * mask
        nothing = torch.zeros_like(advantages)
        return Estimates(nothing, advantages, advantages, nothing, nothing, torch.zeros_like(mask))
