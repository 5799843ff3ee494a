"""PPO with a critic, on GRPOTrainer's engine: the algorithm, in the order in which a batch meets it.

    rows            _generate_and_score_completions  the steps of one rollout
      -> episodes   _play                            loop/player.py: environments, tools, plain prompts
      -> batch      _player.pad                      loop/batch.py: its fields and shapes
      -> logprobs   _comparison.add_old, ...         loop/policy_comparison.py: reference, sampler
      -> rewards    _rewards.ask, .scores            loop/rewards.py, loop/turn_rewards.py
      -> advantages _advantages                      loop/targets.py: the critic, GAE, whitening
    mini-batches    _prepare_inputs                  loop/mini_batches.py: new ones every epoch
      -> critic     _value_loss                      gradients/buffers.py keeps its gradient apart
      -> policy     _policy_loss                     core/ratios.py, core/losses.py, and extra terms
    step            training_step                    guards/guards.py: is all of it finite and wanted?

Then transformers' loop clips the policy's gradient and steps; `gradients/optimizers.py` hangs the critic's
gradient and the scale of the step into that. How a trainer is built, and what upstream asks of the class,
is in `agent_trainer.py`; what is borrowed of TRL, and which of its methods are wrapped or ours, in `_trl.py`.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core import (
    ClippedSurrogate,
    aggregation_weights,
    clipped_surrogate,
    clipped_value_loss,
    importance_ratio,
    kl_penalty,
    log_importance_ratio,
)
from ..models.critic import SharedCritic
from ..rollout.turn_batch import TurnBatch, build_turn_batch
from . import citations
from ._trl import profiling_decorator, small_tiles
from .agent_trainer import AgentTrainer
from .evaluation.settings import evaluation_settings, undisturbed
from .host import is_warming_up
from .loop.batch import Batch, full_sequence
from .loop.mini_batches import Totals
from .loop.player import judge
from .loop.rollout import Rollout
from .loop.rows import Row
from .loop.targets import Targets, compute_targets
from .ppo_config import PPOConfig
from .watching import display
from .watching.metrics import MiniBatchMetrics, RolloutMetrics


class PPOTrainer(AgentTrainer):
    """Proximal policy optimisation for language-model agents, over one or several turns.

    Takes GRPOTrainer's arguments in its order, then, by keyword, those that only TRL's former
    PPOTrainer had. Reward functions, tools, environments and datasets are GRPOTrainer's; a dataset of
    pre-tokenised `input_ids` works too.

    Args:
        model: policy, by name or instance; a PeftModel goes on with its adapter, and so does the name
            of a repository or folder that holds one.
        reward_funcs: as in GRPOTrainer. Not needed with an environment that pays rewards.
        args: configuration.
        environment_factory: makes tool environments (GRPOTrainer's contract) or text environments
            (`reset(**row) -> (observation, info)`,
            `step(action) -> (observation, reward, terminated, truncated, info)`), synchronous or not;
            or a dict of factories, among which the rows' `environment` column chooses.
        rollout_func: as in GRPOTrainer; its result may also hold `turn_spans`, `turn_rewards`,
            `terminated` and `truncated`.
        reward_model: one more reward function, a sequence-classification model.
        value_model: critic of its own, or the name of a repository or folder: the critic that was
            published there with its policy, otherwise the model itself. Default: with a LoRA policy a
            second adapter on the policy's backbone, otherwise a second backbone with its weights.
        ref_model: reference policy. Default: the policy as it is at the start.
        data_collator: accepted from PPO scripts; padding collators have nothing to do here.
        turn_reward_funcs: functions, asynchronous ones too, and reward models that score each turn in
            its context: they are called as reward functions are, with one prompt (everything before
            the turn) and one completion (the turn) per turn.
        turn_reward_processing_classes: tokenizers of the reward models among them.
        eval_environment_factory: makes the environments of evaluation, in the form of
            `environment_factory` and of the same kinds. Default: the same factory, other instances.

    Raises:
        ValueError: an argument or option that cannot work; the message names the fix.

    Source: Schulman et al. 2017, arXiv:1707.06347; TRL 1.12 for names and reward shaping.
    """

    config_class = PPOConfig
    # Upstream's form.
    _tag_names = ["trl", "ppo", "reinforcement-learning", "multi-turn"]  # noqa: RUF012
    _name = "PPO"
    _paper = {  # noqa: RUF012
        "title": "Proximal Policy Optimization Algorithms",
        "id": "1707.06347",
        "citation": citations.PPO,
    }

    # --------------------------------------------------------------------------- rollout

    def _generate_and_score_completions(self, inputs: list[Row]) -> Batch:
        """One rollout batch: play, pad, logprobs, reference, score, turns, values, advantages, log."""
        started = time.perf_counter()
        with self._stale.playing() if self.model.training else nullcontext():
            rollout = self._play(inputs)
            batch = self._player.pad(rollout)
            sampled = (batch["completion_mask"] * batch["tool_mask"]).sum()
            batch["num_items_in_batch"] = self.accelerator.gather(sampled).sum()
            self._comparison.add_old(batch)
            self._comparison.add_reference(batch)
            all_rewards = self._rewards.ask(rollout)
        with torch.no_grad():
            scores, scored = self._rewards.scores(rollout)
            dtype = torch.promote_types(self.model.dtype, torch.float32)
            turns = build_turn_batch(
                rollout.episodes, rollout.turn_rewards, batch["completion_mask"], dtype
            )
            rollout.earnings = turns.earned(scores).tolist()
            batch["turn_index"] = turns.turn_index
            batch["loss_mask"] = turns.action_mask & scored.unsqueeze(1)
            self._comparison.add_sampler_weights(batch)
            kl = self._comparison.kl_to_reference(batch)
            targets = self._advantages(batch, turns, scores, scored, kl)
        batch["values"], batch["returns"] = targets.values, targets.returns
        batch["advantages"], batch["value_mask"] = targets.advantages, targets.value_mask
        seconds = time.perf_counter() - started
        if self.model.training:
            self._mini_batches.seconds -= seconds  # which are not part of the update's time
        self._log_rollout(rollout, all_rewards, batch, turns, scores, kl, targets, seconds)
        return batch

    def _play(self, inputs: list[Row]) -> Rollout:
        # The 1 stands for nothing, but the seeds of all runs depend on it.
        rollout = self._player.play(inputs, (self.args.seed, 1, self.state.global_step))
        if self.model.training and rollout.by_engine:
            self._guards.count_failures(rollout.episodes)
        return rollout

    def _advantages(
        self, batch: Batch, turns: TurnBatch, scores: Tensor, scored: Tensor, kl: Tensor | None
    ) -> Targets:
        """From scores [B] to per-token advantages, by way of the critic.

        PPO has no use for which episodes are `scored`, [B]: `loss_mask` knows. Groups of episodes have.
        """
        values, final_values = self._rollout_values(batch)
        return compute_targets(
            turns,
            scores.to(values.dtype),
            values,
            final_values,
            kl,
            batch["loss_mask"],
            self.args,
            # Warm-up regresses on Monte Carlo returns, which is GAE with lambda 1.
            1.0 if is_warming_up(self) else self.args.lam,
            self.accelerator.reduce,
        )

    def _rollout_values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Values before each token [B, T] and after the last one [B], in bounded chunks."""
        with self.critic.active():
            values = self._forward.values(batch, self.args.forward_batch_size)
        last = batch["completion_mask"].long().sum(dim=1, keepdim=True)
        return values[:, :-1], values.gather(1, last).squeeze(1)

    def _log_rollout(
        self,
        rollout: Rollout,
        all_rewards: Tensor,
        batch: Batch,
        turns: TurnBatch,
        scores: Tensor,
        kl: Tensor | None,
        targets: Targets,
        seconds: float,
    ) -> None:
        """Write the rollout down; `all_rewards` are those of all processes, [W * B, F]."""
        log, gather = self._rollout_log, self.accelerator.gather
        shown = targets.advantages.sum(1) / batch["loss_mask"].sum(1).clamp(min=1)
        judge(rollout)
        if self.model.training:
            self._guards.keep_best(rollout.episodes)  # nothing of the rollout is logged yet
        log.write(rollout, all_rewards, gather(shown.contiguous()).tolist(), spread=self.has_critic)
        metrics = RolloutMetrics(values=self.has_critic)
        log.add(metrics.collect(batch, turns, scores, kl, targets, rollout, seconds, gather))
        self._trace.rollout(rollout, batch)

    # ---------------------------------------------------------------------------- update

    @profiling_decorator
    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        """The micro-batch that is due, of a rollout batch that is new every so many of them."""
        if not self.model.training:
            return self._generate_and_score_completions(generation_batch)

        def play() -> Batch:
            with self._guards.rollout():
                return self._generate_and_score_completions(generation_batch)

        if self._mini_batches.advance(play):
            self._start_mini_batch(empty=self._mini_batches.is_empty)
        return self._mini_batches.micro_batch

    def _start_mini_batch(self, *, empty: bool = False) -> None:
        """Begin with no gradients and metrics, also where a step was interrupted or refused."""
        self._optimizers.critic_grads.clear()
        self._mini_batches.metrics = MiniBatchMetrics()
        self._guards.start_mini_batch(empty=empty)

    def _compute_loss(self, model: nn.Module, inputs: Batch) -> Tensor:
        """Loss of one micro-batch: its part of the mini-batch's, so that any split is the same."""
        if self._guards.leaves_weights:
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        value_loss = torch.zeros((), device=self.accelerator.device)
        totals = self._mini_batches.totals
        if self.has_critic:
            value_loss = self.args.vf_coef * self._value_loss(inputs, totals)
        if is_warming_up(self):
            return value_loss.requires_grad_()  # the policy rests; its gradient stays None
        loss = self._policy_loss(model, inputs, totals) + value_loss
        if self.is_deepspeed_enabled:
            weighs = self._guards.check_before_backward(loss)
            loss = loss if weighs or not self.accelerator.sync_gradients else loss.detach()
        return loss

    def _value_loss(self, inputs: Batch, totals: Totals) -> Tensor:
        """Clipped regression of the critic; detached, the gradient goes into the critic's buffer."""
        value_mask, processes = inputs["value_mask"], self.accelerator.num_processes
        with self.critic.active():
            values = self._forward.values(inputs)[:, :-1]
            per_token, clipped = clipped_value_loss(
                values, inputs["values"], inputs["returns"], value_mask, self.args.cliprange_value
            )
            loss = per_token.sum() / totals.value_tokens.clamp(min=1) * processes
            self._optimizers.critic_grads.add(self.args.vf_coef * loss)
        self._mini_batches.metrics.add_value(per_token, clipped, value_mask)
        return loss.detach()

    def _policy_loss(self, model: nn.Module, inputs: Batch, totals: Totals) -> Tensor:
        """Clipped surrogate at the chosen ratio level, plus what else the options ask for."""
        loss_mask = inputs["loss_mask"]
        ids, mask, length = full_sequence(inputs)
        logprobs, entropies, aux_loss = self._get_per_token_logps_and_entropies(
            model, ids, mask, length, compute_entropy=True, compute_aux_loss=self.aux_loss_enabled
        )
        assert entropies is not None
        log_ratio = self._log_ratio(inputs, logprobs)
        surrogate = clipped_surrogate(
            log_ratio,
            inputs["advantages"],
            loss_mask,
            self.epsilon_low,
            self.epsilon_high,
            delta=self.args.delta,
            weights=self._comparison.token_factors(inputs, logprobs),
        )
        weights = self.accelerator.num_processes * aggregation_weights(
            loss_mask,
            self.loss_type,
            num_episodes=totals.episodes,
            num_tokens=totals.policy_tokens,
            max_length=self.max_completion_length,
            dtype=surrogate.kept.dtype,
        )
        extra = self._extra_loss(inputs, logprobs, entropies, aux_loss, log_ratio, weights, totals)
        self._mini_batches.metrics.add_policy(surrogate, entropies, loss_mask, mask.sum())
        self._mini_batches.metrics.add_drift(inputs, logprobs)
        surrogate = self._stabilise(inputs, surrogate, weights, logprobs, entropies)
        self._trace.observe(inputs, logprobs, log_ratio, surrogate)
        return self._combine(inputs, surrogate, weights, extra)

    def _stabilise(
        self,
        inputs: Batch,
        surrogate: ClippedSurrogate,
        weights: Tensor,
        logprobs: Tensor,
        entropies: Tensor,
    ) -> ClippedSurrogate:
        """For subclasses that weigh episodes, or scale the step by the terms, [B, T] each."""
        return surrogate

    def _log_ratio(self, inputs: Batch, logprobs: Tensor) -> Tensor:
        """Log of policy over old policy, at the chosen level, [B, T]."""
        old_logprobs = inputs.get("old_per_token_logps")
        return log_importance_ratio(
            logprobs,
            logprobs.detach() if old_logprobs is None else old_logprobs,
            inputs["turn_index"],
            self.importance_sampling_level,
            loss_mask=inputs["loss_mask"],
        )

    def _combine(
        self, inputs: Batch, surrogate: ClippedSurrogate, weights: Tensor, extra: Tensor | None
    ) -> Tensor:
        """Gradient of the kept terms, value of the usual min/clip objective."""
        kept = (surrogate.kept * weights).sum()
        value = (surrogate.objective * weights).sum()
        loss = -kept + (kept - value).detach()
        return loss if extra is None else loss + extra

    def _extra_loss(
        self,
        inputs: Batch,
        logprobs: Tensor,
        entropies: Tensor,
        aux_loss: Tensor | None,
        log_ratio: Tensor,
        weights: Tensor,
        totals: Totals,
    ) -> Tensor | None:
        """Loss-side KL, entropy bonus and router loss; None when the options ask for none."""
        terms, args, loss_mask = [], self.args, inputs["loss_mask"]
        if args.beta != 0.0:
            kl = kl_penalty(logprobs, inputs["ref_per_token_logps"], "k3", loss_mask=loss_mask)
            self._mini_batches.metrics.add_mean("kl", kl, loss_mask)
            kl = kl * importance_ratio(log_ratio) if args.use_bias_correction_kl else kl
            terms.append(args.beta * (kl * weights).sum())
        if args.entropy_coef != 0.0:
            entropy = entropies.masked_fill(~loss_mask, 0.0).sum()
            entropy = entropy / totals.policy_tokens.clamp(min=1) * self.accelerator.num_processes
            terms.append(-args.entropy_coef * entropy)
        if aux_loss is not None:
            counts = torch.ones_like(aux_loss).bool()
            self._mini_batches.metrics.add_mean("aux_loss", aux_loss, counts)
            terms.append(self.router_aux_loss_coef * aux_loss / args.gradient_accumulation_steps)
        return sum(terms[1:], terms[0]) if terms else None

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Upstream's step on one micro-batch; closes the mini-batch where it is the last one."""
        started = time.perf_counter()
        with small_tiles(self.accelerator.device):  # of backward passes too
            loss = super().training_step(*args, **kwargs)
            self._after_backward()
        self._guards.add_loss(loss)
        if self.accelerator.sync_gradients and self._guards.inspect():
            self._before_optimizer_step()
        self._mini_batches.seconds += time.perf_counter() - started
        if self.accelerator.sync_gradients:
            metrics, window = self._mini_batches.flush(), self._mini_batches.window
            self._rollout_log.add(metrics)
            if not self._guards.admit(metrics):
                self.model.zero_grad(set_to_none=True)  # which the optimizer passes over
                if self._guards.verdict != "critic_only":
                    self._start_mini_batch()
            self._trace.end_mini_batch(window, verdict=self._guards.verdict)
        return loss

    def _scales_updates(self) -> bool:
        """For subclasses that shorten steps."""
        return False

    def _after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """For subclasses that need the policy's parameters."""

    def _after_backward(self) -> None:
        """For subclasses that need another gradient once the micro-batch's graph is gone."""

    def _before_optimizer_step(self) -> None:
        """Reduce and clip the critic's gradient; upstream clips the policy's, DeepSpeed has stepped."""
        if not self.has_critic:
            return
        gradient, limit = self._optimizers.critic_grads, self.args.critic_max_grad_norm
        if self.accelerator.num_processes > 1:
            gradient.reduce(partial(self.accelerator.reduce, reduction="mean"))
        norm = gradient.clip_(self.args.max_grad_norm if limit is None else limit)
        self._mini_batches.metrics.add_scalar("value/grad_norm", norm)

    # --------------------------------------------------------------------------- for users

    def generate_completions(self, sampling: bool = False) -> None:
        """Play a few episodes of the evaluation (or training) data and print them as a table.

        Args:
            sampling: stop after the first batch, as PPO scripts use it.
        """
        with undisturbed(self, self._upstream), evaluation_settings(self):
            play = self._evaluator.play
            display.print_episodes(self, self._upstream, play, first_batch_only=sampling)

    @property
    def stop_reason(self) -> str | None:
        """Why a guard or a signal ended the last `train()` early; None where none did."""
        return self._guards.ending.reason

    @property
    def stop_signal(self) -> int | None:
        """Number of the signal that came during the last `train()`; None where none did."""
        return self._guards.ending.signal

    @property
    def uses_shared_critic(self) -> bool:
        """Whether policy and critic share one backbone."""
        return isinstance(self.critic, SharedCritic)
