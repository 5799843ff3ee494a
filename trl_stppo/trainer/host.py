"""What a helper may ask of a trainer: its public side, and the private state of upstream by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import torch

from ..models.critic import Critic
from ..rollout.func import RolloutFunc
from ._trl import GRPOTrainer
from .batch import Batch
from .ppo_config import PPOConfig

T = TypeVar("T")
Wrapped = Callable[..., Any]  # upstream's method behind one of our hooks


class Host(GRPOTrainer):
    """Upstream's trainer, with what ours add that helpers may ask for."""

    args: PPOConfig
    rollout_func: RolloutFunc | None
    config_class: type[PPOConfig]
    has_critic = True
    critic: Critic


def is_warming_up(host: Host) -> bool:
    """Whether the coming step trains the critic alone."""
    return host.state.global_step < host.args.critic_warmup_steps


class _Borrowed(Generic[T]):
    """An attribute of the trainer under the name that we give it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, owner: Upstream | None, kind: type) -> T:
        value: Any = self if owner is None else getattr(owner.trainer, self.name)
        return cast(T, value)

    def __set__(self, owner: Upstream, value: T) -> None:
        setattr(owner.trainer, self.name, value)


class Upstream:
    """The private state of GRPOTrainer and of transformers' Trainer that we read and write.

    Upstream offers no other way to it. The contract test holds each of these names against the
    installed versions.
    """

    step: _Borrowed[int] = _Borrowed("_step")  # micro-batches so far
    # The rollout batch in play, cut into micro-batches; None before the first.
    buffer: _Borrowed[list[Batch] | None] = _Borrowed("_buffered_inputs")
    # By mode ("train", "eval") and name, what waits for the next log.
    metrics: _Borrowed[dict[str, dict[str, list[float]]]] = _Borrowed("_metrics")
    logs: _Borrowed[dict[str, Any]] = _Borrowed("_logs")  # what waits for the table of completions
    # What reward functions have given to `log_metric` and `log_extra`.
    pending_metrics: _Borrowed[dict[str, list[float]]] = _Borrowed("_pending_metrics")
    pending_columns: _Borrowed[dict[str, list[Any]]] = _Borrowed("_pending_extra_logs")
    # Of transformers' log of the loss.
    loss: _Borrowed[torch.Tensor] = _Borrowed("_tr_loss")
    total_loss: _Borrowed[float] = _Borrowed("_total_loss_scalar")
    last_logged: _Borrowed[int] = _Borrowed("_globalstep_last_logged")
    # Of the rows that loaders hand on.
    signature_columns: _Borrowed[list[str]] = _Borrowed("_signature_columns")
    # Of the policy, also where the processing class is more than one.
    tokenizer: _Borrowed[Any] = _Borrowed("_tokenizer")
    synced_step: _Borrowed[int] = _Borrowed("_last_loaded_step")  # when vLLM last got the weights
    # What TRL's model card says of a class of trainers.
    method: _Borrowed[str] = _Borrowed("_name")
    paper: _Borrowed[dict[str, str]] = _Borrowed("_paper")
    tags: _Borrowed[list[str]] = _Borrowed("_tag_names")
    # Where it writes to, from a trial.
    output_dir: _Borrowed[Callable[[Any], str]] = _Borrowed("_get_output_dir")
    # Start an upload from a checkpoint's folder, and wait for it.
    push: _Borrowed[Callable[[str], None]] = _Borrowed("_push_from_checkpoint")
    finish_push: _Borrowed[Callable[[], None]] = _Borrowed("_finish_current_push")

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    @property
    def end_ids(self) -> set[int]:
        """What the last token of a whole completion is, in upstream's eyes: an end, or padding."""
        return {*self.trainer.eos_token_ids, self.tokenizer.pad_token_id}

    def decode(self, ids: list[int]) -> str:
        """The text of tokens, without special ones."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text
