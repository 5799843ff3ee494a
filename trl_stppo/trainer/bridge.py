"""The bridge to GRPOTrainer as helpers see it: its public side typed, its private state under our names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from ..models.critic import Critic
from ..rollout.func import RolloutFunc
from ._trl import GRPOTrainer
from .batch import Batch
from .ppo_config import PPOConfig

Wrapped = Callable[..., Any]  # upstream's method behind one of our overrides
Value = TypeVar("Value")


class Bridge(GRPOTrainer):
    """GRPOTrainer with the attributes that helpers read; `AgentTrainer` overrides its methods."""

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
    """Whether the coming step trains the critic alone."""
    return host.state.global_step < host.args.critic_warmup_steps


class Private(Generic[Value]):
    """An attribute or method of the trainer, read and set under its private name."""

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

    step = Private[int]("_step")  # number of micro-batches so far
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
        """Return all values of the next log, those passed to `log_metric` and `log_extra` included."""
        return self.metrics, self.logs, self.pending_metrics, self.pending_columns

    @figures.setter
    def figures(self, values: tuple[Any, ...]) -> None:
        self.metrics, self.logs, self.pending_metrics, self.pending_columns = values

    @property
    def loss(self) -> tuple[torch.Tensor, float, int]:
        """Return the loss's sum since the last log, its sum before that, and the step of that log."""
        trainer = self.trainer
        return trainer._tr_loss, trainer._total_loss_scalar, trainer._globalstep_last_logged

    @loss.setter
    def loss(self, value: tuple[torch.Tensor, float, int]) -> None:
        trainer = self.trainer
        trainer._tr_loss, trainer._total_loss_scalar, trainer._globalstep_last_logged = value

    tokenizer = Private[Any]("_tokenizer")  # also if the processing class has other parts
    synced_step = Private[int]("_last_loaded_step")  # at which vLLM last got the weights
    signature_columns = Private[list[str]]("_signature_columns")  # of the rows that loaders hand on

    @property
    def end_ids(self) -> set[int]:
        """Return the ids that end a complete completion for upstream: ends of turns and padding."""
        return {*self.trainer.eos_token_ids, self.tokenizer.pad_token_id}

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens, without special ones."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    # Methods that users override.
    generate_single_turn = Private[Wrapped]("_generate_single_turn")
    calculate_rewards = Private[Callable[..., torch.Tensor]]("_calculate_rewards")
    logprobs = Private[Wrapped]("_get_per_token_logps_and_entropies")

    # Of TRL's model card; trainer classes have them too.
    method = Private[str]("_name")
    paper = Private[dict[str, str]]("_paper")
    tags = Private[list[str]]("_tag_names")

    output_dir = Private[Callable[[Any], str]]("_get_output_dir")  # of the run, or of a trial
    push = Private[Wrapped]("_push_from_checkpoint")
    finish_push = Private[Wrapped]("_finish_current_push")

    def save_checkpoint(self) -> None:
        """Write a checkpoint of this step."""
        self.trainer._save_checkpoint(self.trainer.model, trial=None)
