"""ST-GRPO: ST-PPO with the advantages of GRPO, RLOO or ReBN, without a critic (`loop/groups.py`)."""

from __future__ import annotations

from .stgrpo_config import STGRPOConfig
from .stppo_trainer import STPPOTrainer


class STGRPOTrainer(STPPOTrainer):
    """Policy optimisation without a critic for multi-turn agents, with turn ratios and stabilizers.

    It accepts `STPPOTrainer`'s arguments, without `value_model`, and an [`STGRPOConfig`]; environments,
    turn rewards, guards, checkpoints and engines are the same. An episode's advantage is its score, turn
    rewards included, relative to the other episodes of its prompt; failed episodes are left out.
    `variant="grpo"` is GRPO, `"gspo"` has one ratio per episode, `"rloo"` compares with the others of
    the group alone, and `"rebn"` compares each turn's return with those of all turns of the batch.

    Source: Li et al., arXiv:2511.20718v2, where it is called SO-GRPO; RLOO and ReBN: `core`.
    """

    config_class = STGRPOConfig
    has_critic = False
    _tag_names = ["trl", "stgrpo", "reinforcement-learning", "multi-turn"]  # noqa: RUF012
    _name = "ST-GRPO"
