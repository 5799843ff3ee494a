"""Settings of `PPOTrainer`: GRPOConfig's, plus the critic's, under the names of TRL's PPO.

A PPO name for something GRPOConfig already has (`cliprange` for `epsilon`, ...) is an alias: set one
of the two; after construction both hold the value. `docs/configuration.md` tables the defaults.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields
from typing import ClassVar

from ._trl import GRPOConfig, SingleGeneration
from .config_checks import check_finite, check_values
from .config_errors import KnownNames, explained
from .config_secrets import KeepsSecrets
from .reporting import resolve_report_to

# PPO's name -> GRPOConfig's name for the same thing.
ALIASES = {
    "num_ppo_epochs": "num_iterations",
    "cliprange": "epsilon",
    "response_length": "max_completion_length",
}


@dataclass(repr=False)
class PPOConfig(KnownNames, KeepsSecrets, GRPOConfig):
    r"""Configuration of [`PPOTrainer`].

    All of [`~trl.GRPOConfig`] is inherited; listed here is what is new or has another default.

    Parameters:
        > Aliases (set either name)

        num_ppo_epochs (`int`, *optional*): passes over each rollout batch; `num_iterations`.
        cliprange (`float`, *optional*): half-width of the clip interval; `epsilon`.
        response_length (`int`, *optional*): tokens of a whole episode after the prompt,
            observations included; `max_completion_length`.
        total_episodes (`int`, *optional*): episodes to collect in all; sets `max_steps` to
            `ceil(total_episodes / rollout batch) * num_iterations * num_mini_batches`.
        num_mini_batches (`int`, *optional*): optimizer steps per epoch. When set,
            `gradient_accumulation_steps` has PPO's meaning (micro-batches per rollout, R): then
            `steps_per_generation` becomes R and `gradient_accumulation_steps` R / num_mini_batches.

        > Critic and advantages

        gamma, lam (`float`): discount and GAE parameter, once per agent token (or per turn).
        advantage_level (`str`): `"token"` or `"turn"`.
        bootstrap_truncated (`bool`): give a truncated episode the critic's value as its successor.
        whiten_rewards, whiten_advantages (`bool`): over the whole rollout batch, all processes.
        cliprange_value (`float`, *optional*): half-width of the value clip; `None` switches it off.
        vf_coef (`float`): weight of the value loss. Nearly without effect under Adam, which divides
            a constant gradient scale out again; `critic_learning_rate` is the dial.
        critic_learning_rate (`float`): of the critic's own optimizer group.
        critic_max_grad_norm (`float`, *optional*): of the critic alone; default `max_grad_norm`.
        critic_warmup_steps (`int`): optimizer steps that train the critic alone, on Monte Carlo
            returns.
        critic_lora_r (`int`, *optional*): rank of the `critic` adapter; default the policy's.
        value_model_name_or_path (`str`, *optional*): a separate critic instead of the shared one.

        > KL in the reward (GRPO's `beta` is the other KL, in the loss)

        kl_coef (`float`): weight of the per-token KL to the reference policy, in nats.
        kl_estimator (`str`): `"k1"` or `"k3"`.
        missing_eos_penalty (`float`, *optional*): subtracted from the score of an episode whose last
            turn does not end in EOS.

        > Guards (docs/reliability.md)

        target_kl (`float`, *optional*): once `policy/approx_kl` of a mini-batch exceeds it, in nats,
            neither its step nor the rest of its rollout batch moves the weights.
        max_consecutive_skips (`int`): optimizer steps in a row that may be skipped, because a loss or
            a gradient is not finite, until the run saves a checkpoint and raises.
        max_env_error_rate (`float`): share of failed episodes, over the last five rollout batches,
            beyond which the run saves a checkpoint and raises; 1 for never.
        min_valid_action_rate (`float`, *optional*): stop the run, with a checkpoint, when
            `turns/valid_action_rate` stays below it.
        min_reward_std (`float`, *optional*): likewise for `reward_std` of the rollout batch.
        collapse_patience (`int`): how many rollout batches (or optimizer steps, for a limit of steps)
            in a row must miss such a limit.
        save_on_signal (`bool`): on SIGTERM or the first SIGINT, finish the optimizer step, save a
            checkpoint and return. Takes the place of `enable_jit_checkpoint`.

        > Multi-turn rollout

        max_turns (`int`, *optional*): turns per episode. The last one is still played; TRL's
            `max_tool_calling_iterations` counts turns whose tools are called instead.
        max_turn_tokens (`int`, *optional*): sampled tokens per turn.
        max_malformed_actions (`int`, *optional*): turns that the environment cannot read until the
            episode ends.
        env_timeout_seconds (`float`, *optional*): of one call into an environment.
        episode_timeout_seconds (`float`, *optional*): of an episode, generation included.
        env_workers (`int`): synchronous environments that run at the same time.
        env_isolation (`str`): `"thread"`, or `"process"`: one process per environment, which may
            then hang for ever or kill itself.
        on_env_error (`str`): what an episode teaches whose environment failed: `"mask"` nothing,
            `"penalise"` that its last turn cost `env_error_penalty`, `"drop"` nothing, and it is
            left out of the batch's figures too.
        env_error_penalty (`float`): reward units.
        generation_slots (`int`, *optional*): episodes in flight at once; default all of the batch.
        rollout_staleness (`int`): updates, of a rollout batch each, by which the policy that plays is
            behind the one that is trained. Above 0 it makes a run as off-policy as an asynchronous
            pipeline on purpose, to see whether it still learns.
        turn_reward_weights (`list[float]`, *optional*): of `turn_reward_funcs`; default 1 each.

        > Evaluation (docs/evaluation.md; None is as in training)

        eval_temperature (`float`, *optional*): of sampling in evaluation; 0 takes the likeliest token.
        eval_top_p, eval_top_k (*optional*): likewise.
        eval_max_completion_length (`int`, *optional*): tokens of a whole episode in evaluation.

        > Recorded episodes (docs/trace.md)

        trace_episodes (`int`): episodes recorded of each update, all processes together; 0 for none.

        > Watching (docs/watching.md)

        report_to: `"auto"`, the default, is trackio on this machine alone where it is installed.

        `vllm_importance_sampling_mode` also takes `"turn_truncate"` (the default) and `"turn_mask"`:
        TRL's own default drops long episodes as a whole for small drifts of many tokens.
    """

    _TRAINER: ClassVar[str] = "PPOTrainer"
    _VALID_LEVELS: ClassVar[tuple[str, ...]] = ("token", "sequence")
    # Options that are refused here and that a subclass honours.
    _HONOURS: ClassVar[tuple[str, ...]] = ()

    # Inherited; named so that the type checker knows what the aliases resolve into.
    gradient_accumulation_steps: int = field(
        default=1,
        metadata={"help": "Micro-batches per optimizer step; per rollout with num_mini_batches."},
    )
    steps_per_generation: int | None = field(
        default=None, metadata={"help": "Micro-batches per rollout batch."}
    )
    max_steps: int = field(default=-1, metadata={"help": "Optimizer steps; -1 for whole epochs."})

    num_generations_eval: int | None = field(
        default=None, metadata={"help": "Episodes per row in evaluation; default num_generations."}
    )
    metric_for_best_model: str | None = field(
        default=None, metadata={"help": "A figure of evaluation; default 'episode/score'."}
    )

    # Defaults of the parents that are changed.
    num_generations: int | None = field(default=1, metadata={"help": "Episodes per prompt."})
    num_iterations: int = field(default=4, metadata={"help": "Epochs over each rollout batch."})
    loss_type: str = field(
        default="grpo", metadata={"help": "One of 'grpo', 'bnpo', 'dr_grpo', 'dapo'."}
    )
    disable_dropout: bool = field(
        default=True,
        metadata={"help": "Dropout would make the ratio of an unchanged policy differ from 1."},
    )

    report_to: None | str | list[str] = field(  # noqa: RUF036 (the form that upstream parses)
        default="auto", metadata={"help": "Integrations; 'auto' is local trackio, if installed."}
    )

    # Aliases.
    num_ppo_epochs: int | None = field(default=None, metadata={"help": "Alias of num_iterations."})
    cliprange: float | None = field(default=None, metadata={"help": "Alias of epsilon."})
    response_length: int | None = field(
        default=None, metadata={"help": "Alias of max_completion_length."}
    )
    total_episodes: int | None = field(
        default=None, metadata={"help": "Episodes to collect in all."}
    )
    num_mini_batches: int | None = field(
        default=None, metadata={"help": "Optimizer steps per epoch over a rollout batch."}
    )

    # Critic and advantages.
    gamma: float = field(default=1.0, metadata={"help": "Discount, 0 < gamma <= 1."})
    lam: float = field(default=0.95, metadata={"help": "GAE parameter, 0 <= lam <= 1."})
    advantage_level: str = field(default="token", metadata={"help": "'token' or 'turn'."})
    bootstrap_truncated: bool = field(
        default=False, metadata={"help": "Bootstrap truncated episodes from the critic."}
    )
    whiten_rewards: bool = field(
        default=False, metadata={"help": "Whiten rewards, keeping the mean."}
    )
    whiten_advantages: bool = field(default=True, metadata={"help": "Whiten advantages."})
    cliprange_value: float | None = field(
        default=0.2, metadata={"help": "Half-width of the value clip; None for no clip."}
    )
    vf_coef: float = field(default=0.1, metadata={"help": "Weight of the value loss."})
    critic_learning_rate: float = field(
        default=1e-5, metadata={"help": "Learning rate of the critic's own optimizer group."}
    )
    critic_max_grad_norm: float | None = field(
        default=None, metadata={"help": "Gradient clip of the critic; default max_grad_norm."}
    )
    critic_warmup_steps: int = field(
        default=0, metadata={"help": "Optimizer steps that train the critic alone."}
    )
    critic_lora_r: int | None = field(
        default=None, metadata={"help": "Rank of the critic adapter; default the policy's."}
    )
    value_model_name_or_path: str | None = field(
        default=None, metadata={"help": "Checkpoint of a separate critic."}
    )

    # KL in the reward.
    kl_coef: float = field(default=0.05, metadata={"help": "Weight of the in-reward KL."})
    kl_estimator: str = field(default="k1", metadata={"help": "'k1' or 'k3'."})
    missing_eos_penalty: float | None = field(
        default=None, metadata={"help": "Subtracted from the score when the episode lacks EOS."}
    )

    # Guards.
    target_kl: float | None = field(
        default=None, metadata={"help": "KL in nats beyond which a rollout batch is left alone."}
    )
    max_consecutive_skips: int = field(
        default=3, metadata={"help": "Steps in a row that may be skipped as not finite."}
    )
    max_env_error_rate: float = field(
        default=0.5, metadata={"help": "Share of failed episodes beyond which a run stops."}
    )
    min_valid_action_rate: float | None = field(
        default=None, metadata={"help": "Stop when turns/valid_action_rate stays below it."}
    )
    min_reward_std: float | None = field(
        default=None, metadata={"help": "Stop when reward_std stays below it."}
    )
    collapse_patience: int = field(
        default=5, metadata={"help": "How often in a row a limit is missed until the run stops."}
    )
    save_on_signal: bool = field(
        default=True, metadata={"help": "On SIGTERM or SIGINT save a checkpoint and stop."}
    )

    # Multi-turn rollout.
    max_turns: int | None = field(default=None, metadata={"help": "Turns per episode."})
    max_turn_tokens: int | None = field(default=None, metadata={"help": "Sampled tokens per turn."})
    max_malformed_actions: int | None = field(
        default=None, metadata={"help": "Unreadable turns until the episode ends."}
    )
    env_timeout_seconds: float | None = field(
        default=120.0, metadata={"help": "Seconds for one call into an environment."}
    )
    episode_timeout_seconds: float | None = field(
        default=None, metadata={"help": "Seconds for one episode."}
    )
    env_workers: int = field(
        default=32, metadata={"help": "Synchronous environments that run at the same time."}
    )
    env_isolation: str = field(default="thread", metadata={"help": "'thread' or 'process'."})
    on_env_error: str = field(
        default="mask", metadata={"help": "'penalise', 'mask' or 'drop' a failed episode."}
    )
    env_error_penalty: float = field(
        default=1.0, metadata={"help": "Price of a failed environment under 'penalise'."}
    )
    generation_slots: int | None = field(
        default=None, metadata={"help": "Episodes in flight at once; default the whole batch."}
    )
    rollout_staleness: int = field(
        default=0, metadata={"help": "Updates by which the policy that plays is behind."}
    )
    turn_reward_weights: list[float] | None = field(
        default=None, metadata={"help": "Weights of turn_reward_funcs; default 1 each."}
    )
    vllm_importance_sampling_mode: str = field(
        default="turn_truncate",
        metadata={"help": "'{turn,token,sequence}_{truncate,mask}': correction of the sampler."},
    )

    # Evaluation.
    eval_temperature: float | None = field(
        default=None, metadata={"help": "In evaluation; 0 is greedy; default temperature."}
    )
    eval_top_p: float | None = field(default=None, metadata={"help": "As top_p, in evaluation."})
    eval_top_k: int | None = field(default=None, metadata={"help": "As top_k; 0 for all tokens."})
    eval_max_completion_length: int | None = field(
        default=None, metadata={"help": "In evaluation; default max_completion_length."}
    )
    trace_episodes: int = field(
        default=8, metadata={"help": "Episodes of each update that are recorded; 0 for none."}
    )

    # Names that PPO scripts set.
    stop_token: str | None = field(
        default=None, metadata={"help": "'eos' or None; EOS always ends."}
    )
    stop_token_id: int | None = field(default=None, metadata={"help": "Ends a turn, as EOS does."})
    local_rollout_forward_batch_size: int | None = field(
        default=None,
        metadata={"help": "Episodes per value pass; default per_device_train_batch_size."},
    )
    num_sample_generations: int = field(
        default=0, metadata={"help": "How often to print sample episodes during training."}
    )
    sft_model_path: str | None = field(default=None, metadata={"help": "Read by PPO scripts."})
    reward_model_path: str | None = field(default=None, metadata={"help": "Read by PPO scripts."})
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Read by PPO scripts."})
    model_adapter_name: str | None = field(
        default=None, metadata={"help": "Only 'default': the adapter that is trained."}
    )
    ref_adapter_name: str | None = field(
        default=None, metadata={"help": "Only 'ref': a frozen copy made at start."}
    )

    def __post_init__(self) -> None:
        check_finite(self)
        resolve_report_to(self)
        self._resolve_aliases()
        mini_batches = self._resolve_mini_batches()
        if single := self.num_generations == 1:
            self.num_generations = SingleGeneration(1)
        # Each repetition is an episode of its own, so evaluation batches need not hold whole groups.
        repetitions, self.num_generations_eval = self.num_generations_eval, 1
        metric_given = self.metric_for_best_model is not None
        with explained(self):
            super().__post_init__()
        self.num_generations_eval = repetitions
        if self.metric_for_best_model == "loss" and not metric_given:
            self.metric_for_best_model, self.greater_is_better = "episode/score", True
        if single:
            self.num_generations = 1
        self._resolve_schedule(mini_batches)
        check_values(self)

    def _is_set(self, name: str) -> bool:
        """Whether a field differs from its default, which is all a dataclass can tell."""
        spec = next(f for f in fields(self) if f.name == name)
        default = spec.default if spec.default is not MISSING else None
        return getattr(self, name) != default

    def _resolve_aliases(self) -> None:
        for alias, name in ALIASES.items():
            value = getattr(self, alias)
            if value is None:
                setattr(self, alias, getattr(self, name))
                continue
            if self._is_set(name) and getattr(self, name) != value:
                raise ValueError(
                    f"`{alias}={value}` contradicts `{name}={getattr(self, name)}`: they are two names "
                    f"of one setting. Set only one of them."
                )
            setattr(self, name, value)

    def _resolve_mini_batches(self) -> int | None:
        """Turn PPO's (R, M) into GRPO's steps_per_generation and accumulation. Returns M."""
        parts = self.num_mini_batches
        if parts is None:
            return None
        if parts < 1:
            raise ValueError(f"`num_mini_batches` must be at least 1, got {parts}.")
        accumulation = self.gradient_accumulation_steps
        if self.steps_per_generation is None and self.generation_batch_size is None:
            if accumulation % parts != 0:
                raise ValueError(
                    f"`gradient_accumulation_steps={accumulation}` (micro-batches per rollout) must be "
                    f"a multiple of `num_mini_batches={parts}`. Set gradient_accumulation_steps to "
                    f"{math.ceil(accumulation / parts) * parts} and adjust "
                    f"per_device_train_batch_size to keep the rollout batch, or change "
                    f"num_mini_batches."
                )
            self.steps_per_generation = accumulation
            self.gradient_accumulation_steps = accumulation // parts
        return parts

    def _resolve_schedule(self, parts: int | None) -> None:
        """Check that mini-batches fill a rollout, and turn total_episodes into max_steps."""
        steps, accumulation = self.steps_per_generation, self.gradient_accumulation_steps
        assert steps is not None  # GRPOConfig has filled it in
        if steps % accumulation != 0:
            raise ValueError(
                f"`steps_per_generation={steps}` must be a multiple of "
                f"`gradient_accumulation_steps={accumulation}`: an optimizer step may not span two "
                f"rollouts. Raise steps_per_generation (or generation_batch_size)."
            )
        if parts is not None and steps != accumulation * parts:
            raise ValueError(
                f"`num_mini_batches={parts}` contradicts `steps_per_generation={steps}` with "
                f"`gradient_accumulation_steps={accumulation}`, which make {steps // accumulation} "
                f"mini-batches. Leave one of the three unset."
            )
        self.num_mini_batches = steps // accumulation
        if self.total_episodes is None:
            return
        if self.total_episodes < 1:
            raise ValueError(f"`total_episodes` must be at least 1, got {self.total_episodes}.")
        rollouts = math.ceil(self.total_episodes / self.generation_batch_size)
        max_steps = rollouts * self.num_iterations * self.num_mini_batches
        if self.max_steps > 0 and self.max_steps != max_steps:
            raise ValueError(
                f"`total_episodes={self.total_episodes}` means {max_steps} optimizer steps and "
                f"contradicts `max_steps={self.max_steps}`. Set only one of them."
            )
        self.max_steps = max_steps
