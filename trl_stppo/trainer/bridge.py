"""Typed access to GRPOTrainer for the parts of a run, its private state included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..models.critic import Critic
from ..rollout.func import RolloutFunc
from ..rollout.images import ImageReader
from ._trl import GRPOTrainer, new_token_limit, profiling_context
from .batch import UpdateData
from .ppo_config import PPOConfig

Wrapped = Callable[..., Any]


class Bridge(GRPOTrainer):
    """GRPOTrainer with types and public names for the private state that the parts of a run read.

    The contract test compares each private name with the installed versions. Methods are looked up at each
    call, so that overrides and methods replaced after construction are used.
    """

    args: PPOConfig
    rollout_func: RolloutFunc | None
    config_class: type[PPOConfig]
    has_critic = True
    critic: Critic
    # Reads images; None if the policy reads only text.
    reader: ImageReader | None = None
    # Upstream sets these attributes without types.
    _tokenizer: PreTrainedTokenizerBase
    reward_processing_classes: list[PreTrainedTokenizerBase | None]
    _signature_columns: list[str]
    _finish_current_push: Callable[[], None]
    _last_loaded_step: int
    _metrics: dict[str, dict[str, list[float]]]
    _logs: dict[str, Any]
    _pending_metrics: dict[str, list[float]]
    _pending_extra_logs: dict[str, list[Any]]

    @property
    def micro_step(self) -> int:
        """Number of micro-batches that were taken so far."""
        return self._step

    @micro_step.setter
    def micro_step(self, value: int) -> None:
        self._step = value

    @property
    def inside_rollout(self) -> bool:
        """Whether more optimizer steps will train on the rollout batch in the buffer."""
        return self.micro_step % self.args.micro_batches_per_rollout != 0

    @property
    def rollout_buffer(self) -> list[UpdateData] | None:
        """The current rollout batch, cut into micro-batches; None before the first."""
        return self._buffered_inputs

    @rollout_buffer.setter
    def rollout_buffer(self, value: list[UpdateData] | None) -> None:
        self._buffered_inputs = value

    @property
    def next_metrics(self) -> dict[str, dict[str, list[float]]]:
        """Values of the next log, by mode ("train", "eval") and name."""
        return self._metrics

    @property
    def next_table(self) -> dict[str, Any]:
        """Columns of the next table of completions."""
        return self._logs

    @property
    def pending_metrics(self) -> dict[str, list[float]]:
        """Values that reward functions passed to `log_metric`."""
        return self._pending_metrics

    @property
    def pending_columns(self) -> dict[str, list[Any]]:
        """Columns that reward functions passed to `log_extra`."""
        return self._pending_extra_logs

    @property
    def next_log(self) -> list[dict[str, Any] | list[Any]]:
        """All containers with values of the next log."""
        pending = [self._pending_metrics, self._pending_extra_logs]
        return [*self._metrics.values(), *self._logs.values(), *pending]

    @property
    def total_loss(self) -> float:
        """The sum of the loss of the run's logged steps."""
        return self._total_loss_scalar

    @total_loss.setter
    def total_loss(self, value: float) -> None:
        self._total_loss_scalar = value

    @property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, without the processor around it."""
        return self._tokenizer

    @property
    def end_ids(self) -> set[int]:
        """Token ids that can end a complete completion: ends of turns and padding."""
        return {*self.eos_token_ids, self._tokenizer.pad_token_id}

    def decode(self, ids: list[int]) -> str:
        """Decode token ids to text, without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    @property
    def signature_columns(self) -> list[str]:
        """The columns that upstream keeps in each row."""
        return self._signature_columns

    def load_vllm(self, send: Callable[[], None], step: int) -> None:
        """Send weights of an optimizer step to vLLM if it has others."""
        if step != self._last_loaded_step:
            with profiling_context(self, "sync_weights"):
                send()
            self._last_loaded_step = step

    def generate_turns(
        self, ids: Any, max_new_tokens: int, seeds: object, images: Any = None
    ) -> Any:
        """Sample a turn per row by upstream's method or its override, which ignore the seeds."""
        training, shown, fields = self.model.training, None, {}
        if self.reader is not None:
            own = images or [()] * len(ids)
            fields = self.reader.generation_inputs(own, ids)
            shown = [[image.open() for image in row] for row in own] if images else None
        with new_token_limit(self, max_new_tokens):
            result = self._generate_single_turn(ids, shown, fields, 1)
        # Continuous batching leaves the model in train mode.
        if self.model.training != training:
            self.model.train(training)
        return result

    def call_reward_funcs(
        self, environments: list[Any] | None, *episodes: list[Any]
    ) -> torch.Tensor:
        """Call the reward functions, which see `environments`; return all processes' rewards, [W * B, F].

        `episodes`: rows, prompts, completions and completion ids.
        """
        before, self.environments = self.environments, environments
        try:
            rewards = self._calculate_rewards(*episodes)
        finally:
            # Restore only in evaluation: callers read the environments of training here, as in upstream.
            if not self.model.training:
                self.environments = before
        for i, func in enumerate(self.reward_funcs):
            if isinstance(func, nn.Module) and bool(rewards[:, i].isnan().any()):
                raise ValueError(
                    f"The reward model {self.reward_func_names[i]!r} returned NaN; check its weights."
                )
        return rewards

    @property
    def policy_logprobs(self) -> Wrapped:
        """The method for log-probabilities, or its override."""
        return self._get_per_token_logps_and_entropies

    @property
    def checkpoint_folder(self) -> Callable[[object], str]:
        """Upstream's method for the folder that holds a trial's checkpoints."""
        return self._get_output_dir

    @property
    def push_checkpoint(self) -> Wrapped:
        """Upstream's method that pushes from a checkpoint."""
        return self._push_from_checkpoint

    @property
    def finish_push(self) -> Wrapped:
        """Upstream's method that waits for a push."""
        return self._finish_current_push

    def save_checkpoint(self) -> None:
        """Write a checkpoint at the current optimizer step, and tell the callbacks of it."""
        self._save_checkpoint(self.model, trial=None)
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)
