"""Typed access to GRPOTrainer for the parts of a run, its private state included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from ..models.critic import Critic
from ..rollout.func import RolloutFunc
from ._trl import GRPOTrainer
from .batch import Batch
from .ppo_config import PPOConfig

Wrapped = Callable[..., Any]
Value = TypeVar("Value")


class Private(Generic[Value]):
    """Public name for upstream's private attribute or method `name`, which is looked up at each use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type) -> Value:
        value: Value = getattr(kind if owner is None else owner, self._name)
        return value

    def __set__(self, owner: Any, value: Value) -> None:
        setattr(owner, self._name, value)


class Bridge(GRPOTrainer):
    """GRPOTrainer with types and public names for the private state that the parts of a run read.

    The contract test compares each private name with the installed versions. Overrides of methods, and
    methods replaced after construction, are used.
    """

    args: PPOConfig
    rollout_func: RolloutFunc | None
    config_class: type[PPOConfig]
    has_critic = True
    critic: Critic
    # Upstream sets this attribute without a type.
    _tokenizer: Any

    # Number of micro-batches that were taken so far.
    micro_step = Private[int]("_step")
    # The current rollout batch, cut into micro-batches; None before the first.
    rollout_buffer = Private[list[Batch] | None]("_buffered_inputs")

    # Values of the next log, by mode ("train", "eval") and name.
    next_metrics = Private[dict[str, dict[str, list[float]]]]("_metrics")
    # Columns of the next table of completions.
    next_table = Private[dict[str, Any]]("_logs")
    # Values that reward functions passed to `log_metric`, and columns that they passed to `log_extra`.
    pending_metrics = Private[dict[str, list[float]]]("_pending_metrics")
    pending_columns = Private[dict[str, list[Any]]]("_pending_extra_logs")

    # The tokenizer, without the processor around it.
    text_tokenizer = Private[Any]("_tokenizer")
    # Columns of the rows that upstream keeps.
    signature_columns = Private[list[str]]("_signature_columns")
    # The step at which vLLM last got the weights.
    vllm_step = Private[int]("_last_loaded_step")
    # The name of the training method, as on the model card.
    method_name = Private[str]("_name")

    # Upstream's methods, or their overrides.
    generate_single_turn = Private[Wrapped]("_generate_single_turn")
    calculate_rewards = Private[Callable[..., torch.Tensor]]("_calculate_rewards")
    policy_logprobs = Private[Wrapped]("_get_per_token_logps_and_entropies")
    # The method for the folder that holds a trial's checkpoints.
    checkpoint_folder = Private[Callable[[Any], str]]("_get_output_dir")
    push_checkpoint = Private[Wrapped]("_push_from_checkpoint")
    finish_push = Private[Wrapped]("_finish_current_push")

    @property
    def loss_sums(self) -> tuple[torch.Tensor, float, int]:
        """Sums of the loss since and before the last log, and the step of that log."""
        return self._tr_loss, self._total_loss_scalar, self._globalstep_last_logged

    @loss_sums.setter
    def loss_sums(self, value: tuple[torch.Tensor, float, int]) -> None:
        self._tr_loss, self._total_loss_scalar, self._globalstep_last_logged = value

    @property
    def end_ids(self) -> set[int]:
        """Token ids that can end a complete completion: ends of turns and padding."""
        return {*self.eos_token_ids, self._tokenizer.pad_token_id}

    def decode(self, ids: list[int]) -> str:
        """Decode token ids to text, without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def save_checkpoint(self) -> None:
        """Write a checkpoint at the current optimizer step."""
        self._save_checkpoint(self.model, trial=None)
