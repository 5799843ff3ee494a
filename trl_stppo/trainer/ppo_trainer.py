"""PPO with a critic, on GRPOTrainer's engine.

GRPOTrainer drives the loop (data, generation, tools, environments, vLLM, checkpoints, Hub). What is
ours hangs on a few wrapped methods, in the order in which a batch meets them:

    rows            _generate_and_score_completions   one rollout batch, TRL's way
      -> turns      build_turn_batch                  where the turns are, what they earned
      -> values     _rollout_values                   the critic, before the update
      -> advantages estimate                          rewards -> GAE -> whitening
    micro-batches   _prepare_inputs                   new mini-batches every epoch
      -> critic     _value_loss                       its gradient waits in a buffer of its own
      -> policy     _policy_loss                      clipped surrogate, plus extra terms
    optimizer step  training_step                     reduce, clip, log

`_compute_loss` is the one upstream method that is replaced rather than wrapped.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core import (
    aggregation_weights,
    clipped_surrogate,
    clipped_value_loss,
    kl_penalty,
    log_importance_ratio,
)
from ..models.critic import CRITIC_FOLDER, Critic, SharedCritic
from . import build, citations, display, plan, rollout_engine
from ._trl import group_by_length, reference_needed, reshuffle
from .gradients import GradientBuffer, StepHooks
from .ppo_config import PPOConfig
from .reports import MiniBatchMetrics
from .rollout_phase import ActorCriticRollout, full_sequence, without_padding
from .turn_rewards import TurnRewardFuncs

Batch = dict[str, Any]


class PPOTrainer(ActorCriticRollout):
    """Proximal policy optimisation for language-model agents, over one or several turns.

    Takes GRPOTrainer's arguments in its order, then, by keyword, those that only TRL's former
    PPOTrainer had. Reward functions, tools, environments and datasets are GRPOTrainer's; a dataset of
    pre-tokenised `input_ids` works too.

    Args:
        model: policy, by name or instance; a PeftModel goes on with its adapter.
        reward_funcs: as in GRPOTrainer. Not needed with an environment that pays rewards.
        args: configuration.
        environment_factory: makes tool environments (GRPOTrainer's contract) or text environments
            (`reset(**row) -> (observation, info)`,
            `step(action) -> (observation, reward, terminated, truncated, info)`), synchronous or not;
            or a dict of factories, among which the rows' `environment` column chooses.
        rollout_func: as in GRPOTrainer; its result may also hold `turn_spans`, `turn_rewards`,
            `terminated` and `truncated`.
        reward_model: one more reward function, a sequence-classification model.
        value_model: critic of its own. Default: with a LoRA policy a second adapter on the policy's
            backbone, otherwise a second backbone with the policy's weights.
        ref_model: reference policy. Default: the policy as it is at the start.
        data_collator: accepted from PPO scripts; padding collators have nothing to do here.
        turn_reward_funcs: functions, asynchronous ones too, and reward models that score each turn in
            its context: they are called as reward functions are, with one prompt (everything before
            the turn) and one completion (the turn) per turn.
        turn_reward_processing_classes: tokenizers of the reward models among them.

    Raises:
        ValueError: an argument or option that cannot work; the message names the fix.

    Source: Schulman et al. 2017, arXiv:1707.06347; TRL 1.12 for names and reward shaping.
    """

    config_class = PPOConfig
    _tag_names = ["trl", "ppo"]  # noqa: RUF012 (upstream's form)
    _name = "PPO"
    _paper = {  # noqa: RUF012
        "title": "Proximal Policy Optimization Algorithms",
        "id": "1707.06347",
        "citation": citations.PPO,
    }

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: PPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        *,
        reward_model: Any = None,
        value_model: Any = None,
        ref_model: Any = None,
        data_collator: Any = None,
        turn_reward_funcs: Any = None,
        turn_reward_processing_classes: Any = None,
    ) -> None:
        args = (
            args if args is not None else plan.default_config(self.config_class, model, self._name)
        )
        plan.check_arguments(
            args, self.config_class, processing_class, data_collator, model, ref_model
        )
        plan.check_distinct(model=model, reward_model=reward_model, value_model=value_model)
        rollout = plan.plan_rollout(args, environment_factory, rollout_func, tools)
        train_dataset = plan.check_dataset(train_dataset, args, rollout)
        plan.check_eval_dataset(eval_dataset, rollout)
        rewards = plan.plan_rewards(
            args,
            reward_funcs,
            reward_processing_classes,
            reward_model,
            processing_class,
            rollout,
            self,
            scores_turns=turn_reward_funcs is not None,
        )
        reference = build.plan_reference(args, model, ref_model, peft_config)
        self._rollout_plan = rollout
        with (
            reference_needed(args, reference.by_upstream, reference.model is not None),
            rewards.extended_weights(args),
        ):
            super().__init__(
                model=model,
                reward_funcs=rewards.funcs,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=rewards.processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=peft_config,
                tools=tools,
                rollout_func=rollout_func,
                environment_factory=rollout.tool_environments,
            )
        build.check_engine(self)
        build.keep_trainable(self.model)
        self._engine = rollout_engine.build_engine(self)
        rollout_engine.take_over(self, len(rewards.funcs))
        self._turn_reward_funcs = TurnRewardFuncs(
            self, turn_reward_funcs, turn_reward_processing_classes, args.turn_reward_weights
        )
        # Column of the reward table that only repeats, for the log, what the turns have earned.
        self._repeated_reward = rewards.repeated
        build.install_reference(self, reference)
        build.install_stop_token(self)
        self.critic: Critic = build.build_critic(self, value_model)
        self._critic_grads = GradientBuffer(self.critic.parameters())
        self._hooks: StepHooks | None = None
        self._init_rollout_state()
        self._mini_batch = torch.zeros(3)
        self._window: list[Batch] = []
        self._batch_metrics = MiniBatchMetrics()
        self._update_seconds = 0.0
        display.install_callbacks(self)

    # ------------------------------------------------------------------- update

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        steps = self.args.steps_per_generation
        new_rollout = self._step % (steps * self.num_iterations) == 0
        if self._step % steps == 0 and not new_rollout and self._buffered_inputs is not None:
            self._buffered_inputs = reshuffle(self._buffered_inputs)
        super()._prepare_inputs(generation_batch)
        accumulation = self.args.gradient_accumulation_steps
        if self._step % accumulation == 0:
            assert self._buffered_inputs is not None
            first = self._step % steps
            # The buffer keeps its order, or the next shuffle would depend on how it was cut.
            self._window = group_by_length(self._buffered_inputs[first : first + accumulation])
            self._mini_batch = self._totals(self._window)
        return without_padding(self._window[self._step % accumulation], self.pad_to_multiple_of)

    def _totals(self, window: list[Batch]) -> Tensor:
        """Episodes, policy tokens and value tokens of a mini-batch, over all processes: [3]."""
        counts = [
            torch.stack(
                [
                    torch.tensor(len(b["loss_mask"]), device=b["loss_mask"].device),
                    b["loss_mask"].sum(),
                    b["value_mask"].sum(),
                ]
            )
            for b in window
        ]
        return self._sum_over_processes(torch.stack(counts).sum(dim=0).float())

    def _compute_loss(self, model: nn.Module, inputs: Batch) -> Tensor:
        """Loss of one micro-batch: its share of the mini-batch's, so that any split is the same."""
        training = self.model.training
        totals = self._mini_batch if training else self._totals([inputs])
        value_loss = self.args.vf_coef * self._value_loss(inputs, totals)
        if training and self._warming_up:
            return value_loss.requires_grad_()  # the policy rests; its gradient stays None
        loss = self._policy_loss(model, inputs, totals) + value_loss
        if not training:
            self._flush_metrics("eval")
        return loss

    def _value_loss(self, inputs: Batch, totals: Tensor) -> Tensor:
        """Clipped regression of the critic; detached, the gradient goes into the critic's buffer."""
        ids, mask, length = full_sequence(inputs)
        value_mask = inputs["value_mask"]
        with self.critic.active():
            with self.accelerator.autocast():
                values = self.critic.values(ids, mask, length)[:, :-1]
            per_token, clipped = clipped_value_loss(
                values, inputs["values"], inputs["returns"], value_mask, self.args.cliprange_value
            )
            loss = per_token.sum() / totals[2].clamp(min=1) * self.accelerator.num_processes
            if self.model.training:
                self._critic_grads.add(self.args.vf_coef * loss)
        self._batch_metrics.add_value(per_token, clipped, value_mask)
        return loss.detach()

    def _policy_loss(self, model: nn.Module, inputs: Batch, totals: Tensor) -> Tensor:
        """Clipped surrogate at the chosen ratio level, plus what else the options ask for."""
        ids, mask, length = full_sequence(inputs)
        loss_mask = inputs["loss_mask"]
        logprobs, entropies, aux_loss = self._get_per_token_logps_and_entropies(
            model, ids, mask, length, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
        )
        old_logprobs = inputs.get("old_per_token_logps")
        old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
        log_ratio = log_importance_ratio(
            logprobs,
            old_logprobs,
            inputs["turn_index"],
            self.importance_sampling_level,
            loss_mask=loss_mask,
        )
        surrogate = clipped_surrogate(
            log_ratio,
            inputs["advantages"],
            loss_mask,
            self.epsilon_low,
            self.epsilon_high,
            delta=self.args.delta,
            weights=self._sample_weights(inputs, logprobs, old_logprobs),
        )
        share = self.accelerator.num_processes * aggregation_weights(
            loss_mask,
            self.loss_type,
            num_episodes=totals[0],
            num_tokens=totals[1],
            max_length=self.max_completion_length,
            dtype=surrogate.kept.dtype,
        )
        extra = self._extra_loss(inputs, logprobs, entropies, aux_loss, log_ratio, share, totals)
        self._batch_metrics.add_policy(surrogate, entropies, loss_mask, ids.numel())
        return self._combine(surrogate, share, extra)

    def _combine(self, surrogate: Any, share: Tensor, extra: Tensor | None) -> Tensor:
        """Gradient of the kept terms, value of the usual min/clip objective."""
        kept = (surrogate.kept * share).sum()
        value = (surrogate.objective * share).sum()
        loss = -kept + (kept - value).detach()
        return loss if extra is None else loss + extra

    def _sample_weights(self, inputs: Batch, logprobs: Tensor, old: Tensor) -> Tensor | None:
        """Constant factors on kept and clipped terms alike: sampler correction, off-policy mask."""
        weights = inputs.get("importance_sampling_ratio")
        threshold = self.args.off_policy_mask_threshold
        if threshold is not None:
            keep = self.get_off_policy_mask(
                inputs["advantages"],
                logprobs,
                inputs.get("sampling_per_token_logps", old),
                inputs["loss_mask"].to(logprobs.dtype),
                threshold,
            )
            weights = keep if weights is None else weights * keep
        return None if weights is None else weights.detach()

    def _extra_loss(
        self,
        inputs: Batch,
        logprobs: Tensor,
        entropies: Tensor,
        aux_loss: Tensor | None,
        log_ratio: Tensor,
        share: Tensor,
        totals: Tensor,
    ) -> Tensor | None:
        """Loss-side KL, entropy bonus and router loss; None when the options ask for none."""
        terms = []
        loss_mask = inputs["loss_mask"]
        if self.args.beta != 0.0:
            kl = kl_penalty(logprobs, inputs["ref_per_token_logps"], "k3", loss_mask=loss_mask)
            self._batch_metrics.add_mean("kl", kl, loss_mask)
            kl = kl * log_ratio.exp() if self.args.use_bias_correction_kl else kl
            terms.append(self.args.beta * (kl * share).sum())
        if self.args.entropy_coef != 0.0:
            entropy = entropies.masked_fill(~loss_mask, 0.0).sum() / totals[1].clamp(min=1)
            terms.append(-self.args.entropy_coef * entropy * self.accelerator.num_processes)
        if self.aux_loss_enabled:
            steps = self.args.gradient_accumulation_steps if self.model.training else 1
            terms.append(self.router_aux_loss_coef * aux_loss / steps)
        return sum(terms[1:], terms[0]) if terms else None

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Upstream's step on one micro-batch; closes the mini-batch where it is the last one."""
        started = time.perf_counter()
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            self._before_optimizer_step()
        self._update_seconds += time.perf_counter() - started - self._rollout_seconds
        self._rollout_seconds = 0.0
        if self.accelerator.sync_gradients:
            self._flush_metrics("train")
        return loss

    def _before_optimizer_step(self) -> None:
        """All gradients of the mini-batch are there; upstream clips the policy's afterwards."""
        if self.accelerator.num_processes > 1:
            self._critic_grads.reduce(self._mean_over_processes)
        limit = self.args.critic_max_grad_norm
        limit = self.args.max_grad_norm if limit is None else limit
        norm = self._critic_grads.clip_(limit)
        self._batch_metrics.add_scalar("value/grad_norm", norm)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Upstream's optimizer for the policy, plus one group for the critic."""
        parameters = self.critic.parameters()
        for parameter in parameters:
            parameter.requires_grad_(
                False
            )  # hides a shared critic's adapter from upstream's groups
        optimizer = super().create_optimizer(*args, **kwargs)
        for parameter in parameters:
            parameter.requires_grad_(True)
        if self._hooks is None:
            build.add_critic_group(optimizer, parameters, self.args, self.lr_scheduler)
            self._hooks = StepHooks(optimizer, self._critic_grads, scales=self._scales_updates())
            self._after_optimizer(optimizer)
        return optimizer

    def _scales_updates(self) -> bool:
        return False

    def _after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """For subclasses that need the policy's parameters."""

    # --------------------------------------------------------------- bookkeeping

    def _flush_metrics(self, mode: str) -> None:
        seconds, self._update_seconds = self._update_seconds, 0.0
        for name, value in self._batch_metrics.flush(self.accelerator.gather, seconds).items():
            self._metrics[mode][name].append(value)

    def generate_completions(self, sampling: bool = False) -> None:
        """Play a few episodes of the evaluation (or training) data and print them as a table.

        Args:
            sampling: stop after the first batch, as PPO scripts use it.
        """
        display.print_episodes(self, first_batch_only=sampling)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            self.critic.save(Path(output_dir or self.args.output_dir) / CRITIC_FOLDER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.critic.load(Path(resume_from_checkpoint) / CRITIC_FOLDER)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.critic.load(Path(self.state.best_model_checkpoint) / CRITIC_FOLDER)

    @property
    def uses_shared_critic(self) -> bool:
        """Whether policy and critic share one backbone."""
        return isinstance(self.critic, SharedCritic)
