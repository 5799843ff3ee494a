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


class Internals:
    """The private state of GRPOTrainer and transformers' Trainer that this package uses.

    The contract test holds each private name against the installed versions. Methods are bound at the call,
    so that overrides and methods replaced after construction are used.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    # ----------------------------------------------------------------- rollout batch in play

    @property
    def step(self) -> int:
        """Return the number of micro-batches so far."""
        return int(self._trainer._step)

    @step.setter
    def step(self, value: int) -> None:
        self._trainer._step = value

    @property
    def buffer(self) -> list[Batch] | None:
        """Return the current rollout batch, cut into micro-batches; None before the first."""
        batches: list[Batch] | None = self._trainer._buffered_inputs
        return batches

    @buffer.setter
    def buffer(self, value: list[Batch] | None) -> None:
        self._trainer._buffered_inputs = value

    # --------------------------------------------------------------------------------- logs

    @property
    def figures(self) -> tuple[Any, ...]:
        """Return all values of the next log, those passed to `log_metric` and `log_extra` included."""
        return self.metrics, self.logs, self.pending_metrics, self.pending_columns

    @figures.setter
    def figures(self, values: tuple[Any, ...]) -> None:
        trainer = self._trainer
        trainer._metrics, trainer._logs = values[:2]
        trainer._pending_metrics, trainer._pending_extra_logs = values[2:]

    @property
    def metrics(self) -> dict[str, dict[str, list[float]]]:
        """Return the metrics of the next log, by mode ("train", "eval") and name."""
        metrics: dict[str, dict[str, list[float]]] = self._trainer._metrics
        return metrics

    @property
    def logs(self) -> dict[str, Any]:
        """Return the columns of the next table of completions."""
        logs: dict[str, Any] = self._trainer._logs
        return logs

    @property
    def pending_metrics(self) -> dict[str, list[float]]:
        """Return values that reward functions passed to `log_metric`."""
        pending: dict[str, list[float]] = self._trainer._pending_metrics
        return pending

    @property
    def pending_columns(self) -> dict[str, list[Any]]:
        """Return values that reward functions passed to `log_extra`."""
        pending: dict[str, list[Any]] = self._trainer._pending_extra_logs
        return pending

    @property
    def loss(self) -> tuple[torch.Tensor, float, int]:
        """Return the loss's sum since the last log, its sum before that, and the step of that log."""
        trainer = self._trainer
        return trainer._tr_loss, trainer._total_loss_scalar, trainer._globalstep_last_logged

    @loss.setter
    def loss(self, value: tuple[torch.Tensor, float, int]) -> None:
        trainer = self._trainer
        trainer._tr_loss, trainer._total_loss_scalar, trainer._globalstep_last_logged = value

    # ------------------------------------------------------------------------------- sampling

    @property
    def tokenizer(self) -> Any:
        """Return the policy's tokenizer, also if the processing class has other parts."""
        return self._trainer._tokenizer

    @property
    def end_ids(self) -> set[int]:
        """Return the ids that end a complete completion for upstream: ends of turns and padding."""
        return {*self._trainer.eos_token_ids, self.tokenizer.pad_token_id}

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens, without special ones."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    @property
    def synced_step(self) -> int:
        """Return the step at which vLLM last got the weights."""
        return int(self._trainer._last_loaded_step)

    @synced_step.setter
    def synced_step(self, value: int) -> None:
        self._trainer._last_loaded_step = value

    @property
    def signature_columns(self) -> list[str]:
        """Return the columns of the rows that loaders hand on."""
        columns: list[str] = self._trainer._signature_columns
        return columns

    # -------------------------------------------------------------- methods that users override

    def generate_single_turn(self, *args: Any) -> Any:
        """Return GRPOTrainer's generation call."""
        return self._trainer._generate_single_turn(*args)

    def calculate_rewards(self, *args: Any) -> torch.Tensor:
        """Return GRPOTrainer's call of all reward functions."""
        rewards: torch.Tensor = self._trainer._calculate_rewards(*args)
        return rewards

    @property
    def logprobs(self) -> Wrapped:
        """Return the trainer's method for log-probabilities and entropies."""
        method: Wrapped = self._trainer._get_per_token_logps_and_entropies
        return method

    # ------------------------------------------------------------------------ saving, the Hub

    @property
    def method(self) -> str:
        """Return the method's name on TRL's model card; trainer classes have it too."""
        return str(self._trainer._name)

    @property
    def paper(self) -> dict[str, str]:
        """Return the paper on the card."""
        paper: dict[str, str] = self._trainer._paper
        return paper

    @property
    def tags(self) -> list[str]:
        """Return the tags of the card."""
        tags: list[str] = self._trainer._tag_names
        return tags

    def output_dir(self, trial: Any) -> str:
        """Return the run's folder, or the folder of a trial."""
        return str(self._trainer._get_output_dir(trial))

    def save_checkpoint(self) -> None:
        """Write a checkpoint of this step."""
        self._trainer._save_checkpoint(self._trainer.model, trial=None)

    def push(self, folder: str) -> None:
        """Start an upload from a checkpoint's folder."""
        self._trainer._push_from_checkpoint(folder)

    def finish_push(self) -> None:
        """Block until the running upload ends."""
        self._trainer._finish_current_push()
