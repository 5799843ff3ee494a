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
        self, batch: Batch, turns: TurnBatch, scores: Tensor, scored: Tensor, kl: Tensor | None
    ) -> Estimates:
        """The same advantage for all tokens of an episode."""
        if turns.turn_rewards is not None:
            scores = scores + turns.turn_rewards.sum(dim=1)
        mask = batch["loss_mask"]
        groups = (-1, self.num_generations if self.model.training else 1)
        every, counts = (self.accelerator.gather(x).view(groups) for x in (scores, scored))
        relative = group_advantages(every, counts, self.args.scale_rewards)
        self._log_spread(every[counts], relative)
        first = self.accelerator.process_index * len(scores)
        advantages = relative.flatten()[first : first + len(scores), None] * mask
        nothing = torch.zeros_like(advantages)
        return Estimates(nothing, advantages, advantages, nothing, nothing, torch.zeros_like(mask))

    def _log_spread(self, scores: Tensor, relative: Tensor) -> None:
        """Upstream has logged these two without turn reward functions and penalties."""
        figures = self._metrics["train" if self.model.training else "eval"]
        figures["reward_std"][-1:] = [scores.std().item() if len(scores) > 1 else 0.0]
        if self.model.training:
            flat = (relative == 0).all(dim=1).float()
            figures["frac_reward_zero_std"][-1:] = [flat.mean().item()]
