"""ST-GRPO: the two pieces of ST-PPO on group-relative advantages, without a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import group_advantages
from ..rollout.turn_batch import TurnBatch
from .loop.batch import Batch
from .loop.targets import Targets
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
    ) -> Targets:
        """The same advantage for all tokens of an episode."""
        scores, mask = turns.earned(scores), batch["loss_mask"]
        groups = (-1, self.num_generations if self.model.training else 1)
        every, counts = (self.accelerator.gather(x).view(groups) for x in (scores, scored))
        relative = group_advantages(every, counts, self.args.scale_rewards)
        self._rollout_log.add(_spread(every[counts], relative, training=self.model.training))
        first = self.accelerator.process_index * len(scores)
        advantages = relative.flatten()[first : first + len(scores), None] * mask
        nothing = torch.zeros_like(advantages)
        return Targets(nothing, advantages, advantages, nothing, nothing, torch.zeros_like(mask))


def _spread(scores: Tensor, relative: Tensor, *, training: bool) -> dict[str, float]:
    metrics = {"reward_std": scores.std().item() if len(scores) > 1 else 0.0}
    if training:
        flat = (relative == 0).all(dim=1).float()
        metrics["frac_reward_zero_std"] = flat.mean().item()
    return metrics
