"""Settings of `PPOTrainer`: GRPOConfig's, the critic's, and aliases named as in TRL's PPO."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

from ._trl import GRPOConfig, SingleGeneration
from .config_checks import as_floats, check_finite, check_values
from .options import ALIASES, option, takes_ignored

logger = logging.getLogger(__name__)


@takes_ignored
@dataclass
class PPOConfig(GRPOConfig):
    """Configuration of [`PPOTrainer`]: [`~trl.GRPOConfig`] with new options and other defaults.

    Each field has a `help` text, which the API pages and `trl-stppo train --help` show.
    """

    # Name of the trainer class that supports all of these options.
    trainer_name: ClassVar[str] = "PPOTrainer"
    _VALID_LEVELS: ClassVar[tuple[str, ...]] = ("token", "sequence")
    # Options in `config_checks.REFUSED` that this class supports.
    _HONOURS: ClassVar[tuple[str, ...]] = ()
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *GRPOConfig._VALID_DICT_FIELDS,
        "eval_generation_kwargs",
        "vllm_engine_kwargs",
    ]

    # These are no options. STPPOConfig sets them, and studies set whether the norms of the clipping bias are
    # estimated, and whether a second gradient gives exact norms.
    scales_step = False
    measures_clip_bias = False
    takes_second_gradient = False
    stabilizers: ClassVar[Sequence[str]] = ()

    # These are no options. PPO scripts read them, and may set them (`options.IGNORED`).
    dataset_num_proc: ClassVar[int | None] = None
    model_adapter_name: ClassVar[str | None] = None
    ref_adapter_name: ClassVar[str | None] = None
    num_sample_generations: ClassVar[int] = 0

    # Inherited fields that have a second name, repeated because the type checker looks for them here.
    gradient_accumulation_steps: int = option(
        1, "Micro-batches per optimizer step; per rollout if num_mini_batches is set."
    )
    steps_per_generation: int | None = option(None, "Micro-batches per rollout batch.")
    max_steps: int = option(-1, "Optimizer steps; -1 for whole epochs.")
    logging_steps: float | None = option(
        None, "Optimizer steps from one log to the next; default those of a rollout batch."
    )

    gradient_checkpointing: bool | None = option(
        None, "Compute activations again in backward passes; default True on an accelerator alone."
    )
    num_generations_eval: int | None = option(
        None, "Episodes per row in evaluation; default num_generations."
    )
    metric_for_best_model: str | None = option(None, "A metric of evaluation; default 'episode/score'.")

    # Inherited fields with other defaults.
    num_generations: int | None = option(1, "Episodes per prompt.")
    num_iterations: int = option(4, "Epochs over each rollout batch.")
    loss_type: str = option("grpo", "One of 'grpo', 'bnpo', 'dr_grpo', 'dapo'.")
    disable_dropout: bool = option(
        True, "Switch dropout off; with it the ratio of an unchanged policy differs from 1."
    )

    # Aliases: the user sets either name, and both get the value.
    num_ppo_epochs: int | None = option(None, "Passes over each rollout batch; alias of num_iterations.")
    cliprange: float | None = option(
        None,
        "Half-width of the clip interval; alias of epsilon. Unset: 0.2; turn ratios: 0.2 / tokens of a turn.",
    )
    response_length: int | None = option(
        None,
        "Tokens of an episode after the prompt, observations included; alias of max_completion_length.",
    )
    total_episodes: int | None = option(
        None,
        "Total number of episodes; sets max_steps to ceil(total_episodes / rollout batch) "
        "* num_iterations * num_mini_batches.",
    )
    num_mini_batches: int | None = option(
        None,
        "Optimizer steps per epoch over a rollout batch. If set, gradient_accumulation_steps means "
        "micro-batches per rollout, R, as in PPO. An optimizer step then takes R / num_mini_batches of them.",
    )

    gamma: float = option(1.0, "Discount, 0 < gamma <= 1, once per agent token (or per turn).")
    lam: float | None = option(0.95, "GAE's lambda, 0 <= lam <= 1, per token or turn like gamma.")
    advantage_level: str = option("token", "'token' or 'turn'.")
    bootstrap_truncated: bool = option(
        False, "Bootstrap a truncated episode with the critic's value of its last state."
    )
    whiten_rewards: bool = option(
        False, "Whiten rewards over the rollout batch, all processes, keeping the mean."
    )
    cliprange_value: float | None = option(0.2, "Half-width of the value clip; None for no clip.")
    vf_coef: float = option(
        0.1,
        "Weight of the value loss. It has almost no effect under Adam, which divides a "
        "constant gradient scale out again; tune critic_learning_rate instead.",
    )
    critic_learning_rate: float | None = option(
        None, "Learning rate of the critic; default 10 x learning_rate, from 1e-5 to 1e-3."
    )
    critic_warmup_steps: int = option(
        0, "Optimizer steps that train the critic alone, on Monte Carlo returns."
    )

    # The KL in the reward; GRPO's `beta` weighs the KL in the loss.
    kl_coef: float = option(
        0.05, "Weight of the per-token KL to the reference policy in the reward, in nats."
    )
    kl_estimator: str = option("k1", "'k1' or 'k3'.")
    missing_eos_penalty: float | None = option(
        None, "Subtracted from the score of an episode whose last turn does not end in EOS."
    )

    # Guards (docs/reliability.md).
    enable_jit_checkpoint: bool = option(
        True,
        "On SIGTERM or the first SIGINT, finish the optimizer step, save a checkpoint and "
        "return; with this package's own handler.",
    )

    # Multi-turn rollout (docs/environments.md).
    max_turns: int | None = option(
        None,
        "Turns per episode. The environment still plays the last one. TRL's "
        "max_tool_calling_iterations instead counts turns whose tools are called.",
    )
    max_turn_tokens: int | None = option(None, "Sampled tokens per turn.")
    max_images: int | None = option(
        None,
        "Images that the policy reads at once. An observation beyond it opens a context with the newest half "
        "of them.",
    )
    env_timeout_seconds: float | None = option(120.0, "Seconds for one call into an environment.")
    generation_slots: int | None = option(None, "Episodes in flight at once; default the whole batch.")
    rollout_staleness: int = option(
        0,
        "Updates, of a rollout batch each, by which the playing policy is behind the trained "
        "one. Above 0 it makes a run as off-policy as an asynchronous pipeline, to test whether "
        "it still learns.",
    )
    agent_endpoint: bool = option(
        False,
        "Open a loopback address for agents in other processes: `client.base_url`, with the episode's "
        "secret in `client.api_key`.",
    )
    rollout_overlap: bool = option(
        False,
        "Play the next rollout batch while the present one is trained on, by the policy from before that "
        "update: episodes are one update old, as with rollout_staleness=1. For slow tools, and for a vLLM "
        "server on devices of its own.",
    )
    vllm_importance_sampling_mode: str = option(
        "turn_truncate",
        "Correction of the sampler: 'turn_truncate', 'turn_mask', or one of TRL's modes. TRL's "
        "default drops long episodes completely for small drifts of many tokens.",
    )
    vllm_engine_kwargs: dict[str, Any] | str | None = option(
        None,
        "Arguments of a colocated `vllm.LLM` that have no field of their own, such as dtype (default: that "
        "of the policy's forward passes), block_size, enforce_eager, or enable_lora=False.",
    )

    # Evaluation (docs/evaluation.md) and recorded episodes (docs/watching.md).
    eval_generation_kwargs: dict[str, Any] | str | None = option(
        None,
        "Settings of evaluation that differ from training: temperature (0 takes the likeliest "
        "token), top_p, top_k, max_completion_length (tokens of an episode).",
    )
    trace_episodes: int = option(8, "Episodes recorded of each update, all processes together; 0 for none.")

    stop_token: str | None = option(None, "'eos' or None; EOS always ends.")
    stop_token_id: int | None = option(None, "Ends a turn, as EOS does.")
    local_rollout_forward_batch_size: int | None = option(
        None, "Episodes per value pass; default per_device_train_batch_size."
    )
    sft_model_path: str | None = option(None, "Read by PPO scripts.")
    reward_model_path: str | None = option(None, "Read by PPO scripts.")

    def to_dict(self) -> dict[str, Any]:
        """Return upstream's dictionary of settings, for trackers."""
        # Upstream hides every setting whose name ends in `_token`, but this one is no secret.
        return {**super().to_dict(), "stop_token": self.stop_token}

    def __post_init__(self) -> None:
        check_finite(self)
        self._resolve_aliases()
        mini_batches = self._resolve_mini_batches()
        if single := self.num_generations == 1:
            self.num_generations = SingleGeneration(1)
        # Evaluation batches may split groups, so hide the number from upstream's divisibility check.
        repetitions, self.num_generations_eval = self.num_generations_eval, 1
        logs_rollouts = self.logging_steps is None
        if logs_rollouts:
            self.logging_steps = GRPOConfig.logging_steps
        metric_given = self.metric_for_best_model is not None
        if self.num_generations is not None and self.num_generations < 1:
            raise ValueError(f"`num_generations={self.num_generations}`: must be 1 or more.")
        if self.gradient_checkpointing is None:
            self.gradient_checkpointing = torch.accelerator.is_available() and not self.use_cpu
        accelerated = is_torch_bf16_gpu_available() or is_torch_xla_available()
        if vars(self)["bf16"] is None and (self.use_cpu or not accelerated):
            self.bf16 = False
            logger.warning("`bf16` is not set, and no accelerator computes: passes have the weights' dtype.")
        # A copy of a configuration has both, which upstream refuses.
        given = self.generation_batch_size
        if self.steps_per_generation is not None:
            self.__dict__["generation_batch_size"] = None
        super().__post_init__()
        if given not in (None, self.generation_batch_size):
            steps = f"`steps_per_generation={self.steps_per_generation}`"
            raise ValueError(f"`generation_batch_size={given}` contradicts {steps}: set one only.")
        self.__dict__.update(as_floats(self.__dict__))
        self.num_generations_eval = repetitions
        if self.metric_for_best_model == "loss" and not metric_given:
            self.metric_for_best_model, self.greater_is_better = "episode/score", True
        if single:
            self.num_generations = 1
        self._resolve_schedule(mini_batches)
        if logs_rollouts:
            self.logging_steps = self.steps_per_rollout
        self._resolve_critic()
        self._resolve_overlap()
        for name in ("generation_kwargs", "eval_generation_kwargs"):
            if isinstance(kwargs := vars(self)[name], dict):
                kept = {key: value for key, value in kwargs.items() if value is not None}
                setattr(self, name, as_floats(kept) or None)
        check_values(self)

    def _resolve_critic(self) -> None:
        """Set the critic's learning rate; the default is ten times the policy's, within [1e-5, 1e-3]."""
        if self.critic_learning_rate is None:
            # Round to 12 digits, so that the result is 3e-4 and not 0.00030000000000000003.
            ten_times = float(f"{10 * self.learning_rate:.12g}")
            self.critic_learning_rate = min(max(ten_times, 1e-5), 1e-3)

    def _resolve_overlap(self) -> None:
        """Set `rollout_staleness` to 1 if rollouts overlap."""
        if not self.rollout_overlap:
            return
        if (given := self.rollout_staleness) not in (0, 1):
            raise ValueError(f"`rollout_staleness={given}` contradicts `rollout_overlap=True`; allowed: 1.")
        self.rollout_staleness = 1

    @property
    def micro_batches_per_rollout(self) -> int:
        """Return the number of micro-batches that train on one rollout batch, over all epochs."""
        return self.num_iterations * (self.steps_per_generation or 1)

    @property
    def steps_per_rollout(self) -> int:
        """Return the number of optimizer steps that train on one rollout batch, over all epochs."""
        return self.num_iterations * (self.num_mini_batches or 1)

    @property
    def needs_groups(self) -> bool:
        """Return whether advantages compare several episodes of the same prompt."""
        return False

    @property
    def eval_settings(self) -> dict[str, Any]:
        """Return `eval_generation_kwargs` as a dictionary."""
        settings = self.eval_generation_kwargs or {}
        assert isinstance(settings, dict)
        return settings

    @property
    def forward_batch_size(self) -> int:
        """Return the number of rows per forward pass of the critic or a reward model, without gradients."""
        return self.local_rollout_forward_batch_size or self.per_device_train_batch_size

    def _resolve_aliases(self) -> None:
        defaults = {spec.name: spec.default for spec in fields(self)}
        for alias, name in ALIASES.items():
            value = getattr(self, alias)
            if value is None:
                setattr(self, alias, getattr(self, name))
                continue
            if getattr(self, name) not in (defaults[name], value):
                raise ValueError(
                    f"`{alias}={value}` contradicts `{name}={getattr(self, name)}`: set only one of the two."
                )
            setattr(self, name, value)

    def _resolve_mini_batches(self) -> int | None:
        """Convert PPO's batch settings to steps_per_generation and accumulation; return num_mini_batches."""
        parts = self.num_mini_batches
        if parts is None:
            return None
        if parts < 1:
            raise ValueError(f"`num_mini_batches` must be at least 1, got {parts}.")
        accumulation = self.gradient_accumulation_steps
        if self.steps_per_generation is None and self.generation_batch_size is None:
            if accumulation % parts != 0:
                raise ValueError(
                    f"`gradient_accumulation_steps={accumulation}` (micro-batches per rollout) must be a "
                    f"multiple of `num_mini_batches={parts}`. Nearest: {-(-accumulation // parts) * parts}."
                )
            self.steps_per_generation = accumulation
            self.gradient_accumulation_steps = accumulation // parts
        return parts

    def _resolve_schedule(self, parts: int | None) -> None:
        """Check that mini-batches fill a rollout, and turn total_episodes into max_steps."""
        steps, accumulation = self.steps_per_generation, self.gradient_accumulation_steps
        assert steps is not None
        if steps % accumulation != 0:
            raise ValueError(
                f"`steps_per_generation={steps}` must be a multiple of "
                f"`gradient_accumulation_steps={accumulation}`; {math.gcd(steps, accumulation)} would fit."
            )
        if parts is not None and steps != accumulation * parts:
            raise ValueError(
                f"`num_mini_batches={parts}` contradicts `steps_per_generation={steps}` with "
                f"`gradient_accumulation_steps={accumulation}`: allowed are {steps // accumulation}."
            )
        self.num_mini_batches = steps // accumulation
        if self.total_episodes is None:
            return
        if self.total_episodes < 1:
            raise ValueError(f"`total_episodes` must be at least 1, got {self.total_episodes}.")
        rollouts = math.ceil(self.total_episodes / self.generation_batch_size)
        max_steps = rollouts * self.steps_per_rollout
        if self.max_steps > 0 and self.max_steps != max_steps:
            raise ValueError(
                f"`total_episodes={self.total_episodes}` means {max_steps} optimizer steps and "
                f"contradicts `max_steps={self.max_steps}`. Set only one of them."
            )
        self.max_steps = max_steps
