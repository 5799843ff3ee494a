"""Multi-turn agent training with PPO and ST-PPO on today's TRL.

Public names load on first use, so that `trl_stppo.core` and `trl_stppo.envs` import without TRL.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

_LAZY = {
    "Agent": "trl_stppo.agent",
    "PPOConfig": "trl_stppo.trainer.ppo_config",
    "PPOTrainer": "trl_stppo.trainer.ppo_trainer",
    "STGRPOConfig": "trl_stppo.trainer.stgrpo_config",
    "STGRPOTrainer": "trl_stppo.trainer.ppo_trainer",
    "STPPOConfig": "trl_stppo.trainer.stppo_config",
    "STPPOTrainer": "trl_stppo.trainer.ppo_trainer",
    "isolated": "trl_stppo.rollout.isolation",
}

__all__ = [
    "Agent",
    "PPOConfig",
    "PPOTrainer",
    "STGRPOConfig",
    "STGRPOTrainer",
    "STPPOConfig",
    "STPPOTrainer",
    "__version__",
    "isolated",
]

if TYPE_CHECKING:
    from .agent import Agent
    from .rollout.isolation import isolated
    from .trainer.ppo_config import PPOConfig
    from .trainer.ppo_trainer import PPOTrainer, STGRPOTrainer, STPPOTrainer
    from .trainer.stgrpo_config import STGRPOConfig
    from .trainer.stppo_config import STPPOConfig


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
