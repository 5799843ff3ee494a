"""The bridge to GRPOTrainer as helpers see it: its public side typed, its private state under our names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..models.critic import Critic
from ..rollout.func import RolloutFunc
from ._trl import GRPOTrainer
from .batch import Batch
from .ppo_config import PPOConfig

Wrapped = Callable[..., Any]  # upstream's method behind one of our overrides


class Bridge(GRPOTrainer):
    """GRPOTrainer with what our trainers add for helpers; `AgentTrainer` overrides its methods."""

    args: PPOConfig
    rollout_func: RolloutFunc | None
    config_class: type[PPOConfig]
    has_critic = True
    critic: Critic

    @property
    def internals(self) -> Internals:
        """Private state of the trainer."""
        return Internals(self)


def is_warming_up(host: Bridge) -> bool:
    """Whether the coming step trains the critic alone."""
    return host.state.global_step < host.args.critic_warmup_steps


class Internals:
    """The private state of GRPOTrainer and transformers' Trainer that we read and write, and no more.

    The contract test holds each private name against the installed versions. Methods are bound at the call,
    so that overrides and methods replaced after construction are used.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    # ----------------------------------------------------------------- rollout batch in play

    @property
    def step(self) -> int:
        """Micro-batches so far."""
        return int(self._trainer._step)

    @step.setter
    def step(self, value: int) -> None:
        self._trainer._step = value

    @property
    def buffer(self) -> list[Batch] | None:
        """The rollout batch in play, cut into micro-batches; None before the first."""
        batches: list[Batch] | None = self._trainer._buffered_inputs
        return batches

    @buffer.setter
    def buffer(self, value: list[Batch] | None) -> None:
        self._trainer._buffered_inputs = value

    # --------------------------------------------------------------------------------- logs

    @property
    def figures(self) -> tuple[Any, ...]:
        """All that waits for the next log: metrics, completions, `log_metric`'s and `log_extra`'s."""
        return self.metrics, self.logs, self.pending_metrics, self.pending_columns

    @figures.setter
    def figures(self, values: tuple[Any, ...]) -> None:
        trainer = self._trainer
        trainer._metrics, trainer._logs = values[:2]
        trainer._pending_metrics, trainer._pending_extra_logs = values[2:]

    @property
    def metrics(self) -> dict[str, dict[str, list[float]]]:
        """Metrics that wait for the next log, by mode ("train", "eval") and name."""
        metrics: dict[str, dict[str, list[float]]] = self._trainer._metrics
        return metrics

    @property
    def logs(self) -> dict[str, Any]:
        """Columns of the next table of completions."""
        logs: dict[str, Any] = self._trainer._logs
        return logs

    @property
    def pending_metrics(self) -> dict[str, list[float]]:
        """Values that reward functions passed to `log_metric`."""
        pending: dict[str, list[float]] = self._trainer._pending_metrics
        return pending

    @property
    def pending_columns(self) -> dict[str, list[Any]]:
        """Values that reward functions passed to `log_extra`."""
        pending: dict[str, list[Any]] = self._trainer._pending_extra_logs
        return pending

    @property
    def loss(self) -> tuple[torch.Tensor, float, int]:
        """Transformers' log of the loss: the sum since the last log, before it, and that log's step."""
        trainer = self._trainer
        return trainer._tr_loss, trainer._total_loss_scalar, trainer._globalstep_last_logged

    @loss.setter
    def loss(self, value: tuple[torch.Tensor, float, int]) -> None:
        trainer = self._trainer
        trainer._tr_loss, trainer._total_loss_scalar, trainer._globalstep_last_logged = value

    # ------------------------------------------------------------------------------- sampling

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer, also if the processing class is more than one."""
        return self._trainer._tokenizer

    @property
    def end_ids(self) -> set[int]:
        """Last tokens of whole completions in upstream's eyes: ends and padding."""
        return {*self._trainer.eos_token_ids, self.tokenizer.pad_token_id}

    def decode(self, ids: list[int]) -> str:
        """The text of tokens, without special ones."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    @property
    def synced_step(self) -> int:
        """The step at which vLLM last got the weights."""
        return int(self._trainer._last_loaded_step)

    @synced_step.setter
    def synced_step(self, value: int) -> None:
        self._trainer._last_loaded_step = value

    @property
    def signature_columns(self) -> list[str]:
        """Columns of the rows that loaders hand on."""
        columns: list[str] = self._trainer._signature_columns
        return columns

    # -------------------------------------------------------------- methods that users override

    def generate_single_turn(self, *args: Any) -> Any:
        """GRPOTrainer's generation call."""
        return self._trainer._generate_single_turn(*args)

    def calculate_rewards(self, *args: Any) -> torch.Tensor:
        """GRPOTrainer's call of all reward functions."""
        rewards: torch.Tensor = self._trainer._calculate_rewards(*args)
        return rewards

    def logprobs(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's log-probabilities and entropies."""
        return self._trainer._get_per_token_logps_and_entropies(*args, **kwargs)

    # ------------------------------------------------------------------------ saving, the Hub

    @property
    def method(self) -> str:
        """Name of the method on TRL's model card; also of a class of trainers."""
        return str(self._trainer._name)

    @property
    def paper(self) -> dict[str, str]:
        """Paper on the card."""
        paper: dict[str, str] = self._trainer._paper
        return paper

    @property
    def tags(self) -> list[str]:
        """Tags of the card."""
        tags: list[str] = self._trainer._tag_names
        return tags

    def output_dir(self, trial: Any) -> str:
        """The run's folder, of a trial if there is one."""
        return str(self._trainer._get_output_dir(trial))

    def save_checkpoint(self) -> None:
        """Write a checkpoint of this step."""
        self._trainer._save_checkpoint(self._trainer.model, trial=None)

    def push(self, folder: str) -> None:
        """Start an upload from a checkpoint's folder."""
        self._trainer._push_from_checkpoint(folder)

    def finish_push(self) -> None:
        """Wait for the upload under way."""
        self._trainer._finish_current_push()
