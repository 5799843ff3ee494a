"""ST-GRPO: both parts of ST-PPO on advantages without a critic: of GRPO, RLOO or ReBN."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import group_advantages, leave_one_out_advantages, return_batch_norm, token_rewards
from ..rollout.turn_batch import TurnBatch
from .loop.batch import Batch
from .loop.targets import Targets
from .stgrpo_config import STGRPOConfig
from .stppo_trainer import STPPOTrainer


class STGRPOTrainer(STPPOTrainer):
    """Policy optimisation without a critic for multi-turn agents, with turn ratios and the correction.

    Takes `STPPOTrainer`'s arguments, less `value_model`, with an [`STGRPOConfig`]; environments, turn
    rewards, guards, checkpoints and engines are the same. An episode's advantage is its score, turn
    rewards included, relative to the other episodes of its prompt; one that failed is left out.
    `variant="grpo"` is GRPO, `"gspo"` takes one ratio per episode, `"rloo"` compares with the others of
    the group alone, and `"rebn"` compares each turn's return with those of all turns of the batch.

    Source: Li et al., arXiv:2511.20718v2, where it is called SO-GRPO; RLOO and ReBN: `core`.
    """

    config_class = STGRPOConfig
    has_critic = False
    _tag_names = ["trl", "stgrpo", "reinforcement-learning", "multi-turn"]  # noqa: RUF012
    _name = "ST-GRPO"

    def _advantages(
        self, batch: Batch, turns: TurnBatch, scores: Tensor, scored: Tensor, kl: Tensor | None
    ) -> Targets:
        """The same advantage for all tokens of an episode, or with ReBN of a turn."""
        earned, mask = turns.earned(scores), batch["loss_mask"]
        groups = (-1, self.num_generations if self.model.training else 1)
        every, counts = (self.accelerator.gather(x).view(groups) for x in (earned, scored))
        self._rollout_log.add({"reward_std": _std(every[counts])})
        if not self.args.needs_groups:
            rewards = token_rewards(
                turns.turn_index, scores=scores, turn_rewards=turns.turn_rewards
            )
            gamma, total = self.args.gamma, self.accelerator.reduce
            advantages = return_batch_norm(rewards, turns.turn_index, mask, gamma, reduce=total)
            return _targets(advantages, mask)
        if self.args.advantage_estimator == "group":
            relative = group_advantages(every, counts, self.args.scale_rewards)
        else:
            relative = leave_one_out_advantages(every, counts)
        # A score on the mean of its group teaches nothing, in whatever order its rewards were added up.
        noise = 4 * torch.finfo(every.dtype).eps * every.where(counts, 0.0).abs().amax(1, True)
        relative = relative.masked_fill(group_advantages(every, counts, "none").abs() <= noise, 0.0)
        if self.model.training:
            flat = (relative == 0).all(dim=1).float()
            self._rollout_log.add({"frac_reward_zero_std": flat.mean().item()})
        first = self.accelerator.process_index * len(scores)
        return _targets(relative.flatten()[first : first + len(scores), None] * mask, mask)


def _std(scores: Tensor) -> float:
    return scores.std().item() if len(scores) > 1 else 0.0


def _targets(advantages: Tensor, mask: Tensor) -> Targets:
    nothing = torch.zeros_like(advantages)
    return Targets(nothing, advantages, advantages, nothing, nothing, torch.zeros_like(mask))
