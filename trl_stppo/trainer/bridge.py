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


class Bridge(GRPOTrainer):
    """GRPOTrainer with types for the attributes that the parts of a run read."""

    args: PPOConfig
    rollout_func: RolloutFunc | None
    config_class: type[PPOConfig]
    has_critic = True
    critic: Critic

    @property
    def internals(self) -> Internals:
        """Return the trainer's private state."""
        return Internals(self)


def is_warming_up(host: Bridge) -> bool:
    """Whether the next optimizer step trains only the critic."""
    return host.state.global_step < host.args.critic_warmup_steps


class Private(Generic[Value]):
    """Descriptor that reads and sets a private attribute or method of the trainer."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, internals: Internals, owner: Any = None) -> Value:
        return getattr(internals.trainer, self.name)

    def __set__(self, internals: Internals, value: Value) -> None:
        setattr(internals.trainer, self.name, value)


class Internals:
    """The private state of GRPOTrainer and transformers' Trainer that this package uses.

    The contract test holds each private name against the installed versions. Methods are bound at the call,
    so that overrides and methods replaced after construction are used.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    step = Private[int]("_step")
    # The current rollout batch, cut into micro-batches; None before the first.
    buffer = Private[list[Batch] | None]("_buffered_inputs")

    # Of the next log: metrics by mode ("train", "eval") and name, and columns of the table of completions.
    metrics = Private[dict[str, dict[str, list[float]]]]("_metrics")
    logs = Private[dict[str, Any]]("_logs")
    # What reward functions passed to `log_metric` and `log_extra`.
    pending_metrics = Private[dict[str, list[float]]]("_pending_metrics")
    pending_columns = Private[dict[str, list[Any]]]("_pending_extra_logs")

    @property
    def figures(self) -> tuple[Any, ...]:
        """Return metrics, table columns, pending metrics and pending columns of the next log."""
        return self.metrics, self.logs, self.pending_metrics, self.pending_columns

    @figures.setter
    def figures(self, values: tuple[Any, ...]) -> None:
        self.metrics, self.logs, self.pending_metrics, self.pending_columns = values

    @property
    def loss(self) -> tuple[torch.Tensor, float, int]:
        """Return the sums of the loss since and before the last log, and the step of that log."""
        trainer = self.trainer
        return trainer._tr_loss, trainer._total_loss_scalar, trainer._globalstep_last_logged

    @loss.setter
    def loss(self, value: tuple[torch.Tensor, float, int]) -> None:
        trainer = self.trainer
        trainer._tr_loss, trainer._total_loss_scalar, trainer._globalstep_last_logged = value

    tokenizer = Private[Any]("_tokenizer")
    # The step at which vLLM last got the weights.
    synced_step = Private[int]("_last_loaded_step")
    signature_columns = Private[list[str]]("_signature_columns")

    @property
    def end_ids(self) -> set[int]:
        """Return the last token ids of complete completions: ends of turns and padding."""
        return {*self.trainer.eos_token_ids, self.tokenizer.pad_token_id}

    def decode(self, ids: list[int]) -> str:
        """Decode token ids to text, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    generate_single_turn = Private[Wrapped]("_generate_single_turn")
    calculate_rewards = Private[Callable[..., torch.Tensor]]("_calculate_rewards")
    logprobs = Private[Wrapped]("_get_per_token_logps_and_entropies")

    method = Private[str]("_name")

    output_dir = Private[Callable[[Any], str]]("_get_output_dir")
    push = Private[Wrapped]("_push_from_checkpoint")
    finish_push = Private[Wrapped]("_finish_current_push")

    def save_checkpoint(self) -> None:
        """Write a checkpoint at the present optimizer step."""
        self.trainer._save_checkpoint(self.trainer.model, trial=None)
