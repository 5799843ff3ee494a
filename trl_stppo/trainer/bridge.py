"""Typed access to GRPOTrainer for the parts of a run, its private state included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

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
Value = TypeVar("Value")


class Private(Generic[Value]):
    """Public name of a private attribute or method of GRPOTrainer. Each use looks the attribute up."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, host: GRPOTrainer, kind: object) -> Value:
        value: Value = getattr(host, self._name)
        return value

    def __set__(self, host: GRPOTrainer, value: Value) -> None:
        setattr(host, self._name, value)


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
    reward_processing_classes: list[PreTrainedTokenizerBase | None]
    _last_loaded_step: int

    # Number of micro-batches that were taken so far.
    micro_step = Private[int]("_step")
    # The current rollout batch, cut into micro-batches; None before the first.
    rollout_buffer = Private[list[UpdateData] | None]("_buffered_inputs")
    # Values of the next log, by mode ("train", "eval") and name.
    next_metrics = Private[dict[str, dict[str, list[float]]]]("_metrics")
    # Columns of the next table of completions.
    next_table = Private[dict[str, Any]]("_logs")
    # Values that reward functions passed to `log_metric`, and columns that they passed to `log_extra`.
    pending_metrics = Private[dict[str, list[float]]]("_pending_metrics")
    pending_columns = Private[dict[str, list[Any]]]("_pending_extra_logs")
    # The tokenizer, without the processor around it.
    text_tokenizer = Private[PreTrainedTokenizerBase]("_tokenizer")
    # The columns that upstream keeps in each row.
    signature_columns = Private[list[str]]("_signature_columns")
    # The method for log-probabilities, or its override.
    policy_logprobs = Private[Wrapped]("_get_per_token_logps_and_entropies")
    # The folder of a trial's checkpoints; the push of a checkpoint; the end of a push.
    checkpoint_folder = Private[Callable[[object], str]]("_get_output_dir")
    push_checkpoint = Private[Wrapped]("_push_from_checkpoint")
    finish_push = Private[Callable[[], None]]("_finish_current_push")

    @property
    def inside_rollout(self) -> bool:
        """Return whether more optimizer steps will train on the rollout batch in the buffer."""
        return self.micro_step % self.args.micro_batches_per_rollout != 0

    @property
    def loss_sums(self) -> tuple[torch.Tensor, float, int]:
        """The sum of the loss since the last log, its sum before that log, and the step of that log."""
        return self._tr_loss, self._total_loss_scalar, self._globalstep_last_logged

    @loss_sums.setter
    def loss_sums(self, value: tuple[torch.Tensor, float, int]) -> None:
        self._tr_loss, self._total_loss_scalar, self._globalstep_last_logged = value

    @property
    def next_log(self) -> list[dict[str, Any] | list[Any]]:
        """All containers with values of the next log."""
        pending = [self.pending_metrics, self.pending_columns]
        return [*self.next_metrics.values(), *self.next_table.values(), *pending]

    @property
    def end_ids(self) -> set[int]:
        """Token ids that can end a complete completion: ends of turns and padding."""
        return {*self.eos_token_ids, self.text_tokenizer.pad_token_id}

    def decode(self, ids: list[int]) -> str:
        """Decode token ids to text, without special tokens."""
        return self.text_tokenizer.decode(ids, skip_special_tokens=True)

    def load_vllm(self, send: Callable[[], None], step: int) -> None:
        """Send the weights of an optimizer step to vLLM if vLLM has other weights."""
        if step != self._last_loaded_step:
            with profiling_context(self, "sync_weights"):
                send()
            self._last_loaded_step = step

    def generate_turns(self, ids: Any, max_new_tokens: int, seeds: object, images: Any = None) -> Any:
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

    def call_reward_funcs(self, environments: list[Any] | None, *episodes: list[Any]) -> torch.Tensor:
        """Call the reward functions, which see `environments`; return all processes' rewards, [W * B, F].

        `episodes`: rows, prompts, completions and completion ids.
        """
        before, self.environments = self.environments, environments
        try:
            rewards = self._calculate_rewards(*episodes)
        finally:
            # Callers may read the environments of the last training rollout here, as in upstream.
            if not self.model.training:
                self.environments = before
        for i, func in enumerate(self.reward_funcs):
            if isinstance(func, nn.Module) and bool(rewards[:, i].isnan().any()):
                raise ValueError(
                    f"The reward model {self.reward_func_names[i]!r} returned NaN; check its weights."
                )
        return rewards

    def save_checkpoint(self) -> None:
        """Write a checkpoint at the current optimizer step, and tell the callbacks of it."""
        self._save_checkpoint(self.model, trial=None)
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)
