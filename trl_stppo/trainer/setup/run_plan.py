"""The plan of a run, made before GRPOTrainer's constructor is called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .._trl import replaced
from ..planning import text_only
from ..planning.data import DataPlan
from ..planning.plan import RolloutPlan
from ..planning.rewards import RewardPlan
from ..ppo_config import PPOConfig
from . import vllm_engine
from .continuing import GivenCritic
from .models import ReferencePlan


@dataclass(frozen=True)
class RunPlan:
    """Players, rows, policy, reference, critic and rewards of a run."""

    args: PPOConfig
    rollout: RolloutPlan
    evaluation: RolloutPlan
    data: DataPlan
    rewards: RewardPlan
    reference: ReferencePlan
    critic: GivenCritic
    model: Any
    processing_class: Any
    quantization_config: Any

    def upstream_arguments(self) -> dict[str, Any]:
        """Return the arguments for GRPOTrainer's constructor that the plan determines."""
        data = self.data
        tokenizer = text_only.tokenizer_of(
            self.model, self.processing_class, self.args, data.messages, data.plain
        )
        return {
            "args": self.args,
            "model": self.model,
            "processing_class": tokenizer,
            "quantization_config": self.quantization_config,
            # Upstream appends the functions of environments.
            "reward_funcs": list(self.rewards.funcs),
            "reward_processing_classes": self.rewards.processing_classes,
            "train_dataset": data.train,
            "eval_dataset": data.evaluation,
            "environment_factory": self.rollout.tool_environments,
        }

    @contextmanager
    def building_upstream(self, trainer: Any) -> Iterator[None]:
        """Context manager around GRPOTrainer's constructor: set four options for it, then restore them.

        Upstream ties the reference to `beta`, the loss-side KL; ours serves the in-reward KL. A reference
        that the caller passes needs none of upstream's and is synced by us.
        """
        args, reference = self.args, self.reference
        options = {
            "beta": 1.0 if reference.by_upstream else 0.0,
            "sync_ref_model": args.sync_ref_model and reference.model is None,
            "reward_weights": self.rewards.weights(args.reward_weights),
            "enable_jit_checkpoint": False,
        }
        engine = vllm_engine.colocated_engine(
            trainer, args, loaded_by_name=isinstance(self.model, str)
        )
        with replaced(args, **options), engine:
            yield
        trainer.beta = args.beta
