"""The update half of `PPOTrainer`: from a rollout batch to optimizer steps.

Upstream's loop calls `training_step` for every micro-batch, and that `_prepare_inputs`, which deals the
rollout batch out in place of upstream's; the rollout half is in `rollout_phase.py`.
"""

from __future__ import annotations

import time
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
from ._trl import profiling_decorator, small_tiles
from .gradients import GradientBuffer
from .guards import Guards
from .loop.batch import Batch, deal, full_sequence, group_by_length, without_padding
from .reports import MiniBatchMetrics
from .rollout_phase import ActorCriticRollout
from .trace_record import TraceRecorder


class ActorCriticUpdate(ActorCriticRollout):
    """GRPOTrainer whose update trains policy and critic, any split of a mini-batch being the same."""

    _critic_grads: GradientBuffer
    _guards: Guards
    _trace: TraceRecorder

    def _init_update_state(self) -> None:
        self._critic_grads = self._optimizers.critic_grads
        self._mini_batch = torch.zeros(3)
        self._window: list[Batch] = []
        self._batch_metrics = MiniBatchMetrics()
        self._update_seconds = 0.0

    @profiling_decorator
    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        """The micro-batch that is due, of a rollout batch that is new every so many of them.

        Each epoch deals the episodes of the rollout batch into mini-batches anew; the micro-batches of
        a mini-batch hold episodes of like lengths.
        """
        if not self.model.training:
            return self._generate_and_score_completions(generation_batch)
        upstream, steps = self._upstream, int(self.args.steps_per_generation or 1)
        if upstream.step % (steps * self.num_iterations) == 0 or upstream.buffer is None:
            with self._guards.rollout():
                batch = self._generate_and_score_completions(generation_batch)
            upstream.buffer = deal([batch], steps)
        elif upstream.step % steps == 0:
            upstream.buffer = deal(upstream.buffer, steps)
        accumulation = self.args.gradient_accumulation_steps
        if upstream.step % accumulation == 0:
            first = upstream.step % steps
            # The buffer keeps its order, or the next shuffle would depend on how it was cut.
            self._window = group_by_length(upstream.buffer[first : first + accumulation])
            self._mini_batch = self._totals(self._window)
            self._start_mini_batch(empty=not self._mini_batch[1:].any())
        return without_padding(self._window[upstream.step % accumulation])

    def _start_mini_batch(self, *, empty: bool = False) -> None:
        """Drop what a step that was interrupted has left behind."""
        self._critic_grads.clear()
        self._batch_metrics = MiniBatchMetrics()
        self._guards.start_mini_batch(empty=empty)

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
        if self._guards.leaves_weights:
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        value_loss = torch.zeros((), device=self.accelerator.device)
        if self.has_critic:
            value_loss = self.args.vf_coef * self._value_loss(inputs, self._mini_batch)
        if self._warming_up:
            return value_loss.requires_grad_()  # the policy rests; its gradient stays None
        loss = self._policy_loss(model, inputs, self._mini_batch) + value_loss
        if self.is_deepspeed_enabled:
            self._guards.check_before_backward(loss, self._window)
        return loss

    def _value_loss(self, inputs: Batch, totals: Tensor) -> Tensor:
        """Clipped regression of the critic; detached, the gradient goes into the critic's buffer."""
        value_mask = inputs["value_mask"]
        with self.critic.active():
            values = self._values_of(inputs)[:, :-1]
            per_token, clipped = clipped_value_loss(
                values, inputs["values"], inputs["returns"], value_mask, self.args.cliprange_value
            )
            loss = per_token.sum() / totals[2].clamp(min=1) * self.accelerator.num_processes
            self._critic_grads.add(self.args.vf_coef * loss)
        self._batch_metrics.add_value(per_token, clipped, value_mask)
        return loss.detach()

    def _policy_loss(self, model: nn.Module, inputs: Batch, totals: Tensor) -> Tensor:
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
            weights=self._sample_weights(inputs, logprobs),
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
        self._batch_metrics.add_policy(surrogate, entropies, loss_mask, mask.sum())
        self._observe(surrogate, share, logprobs, entropies, loss_mask)
        self._trace.observe(inputs, logprobs, log_ratio, surrogate)
        return self._combine(inputs, surrogate, share, extra)

    def _observe(
        self,
        surrogate: ClippedSurrogate,
        share: Tensor,
        logprobs: Tensor,
        entropies: Tensor,
        loss_mask: Tensor,
    ) -> None:
        """For subclasses that watch the surrogate's terms, [B, T] each, and may scale the step by them."""

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
        self, inputs: Batch, surrogate: ClippedSurrogate, share: Tensor, extra: Tensor | None
    ) -> Tensor:
        """Gradient of the kept terms, value of the usual min/clip objective."""
        kept = (surrogate.kept * share).sum()
        value = (surrogate.objective * share).sum()
        loss = -kept + (kept - value).detach()
        return loss if extra is None else loss + extra

    def _sample_weights(self, inputs: Batch, logprobs: Tensor) -> Tensor | None:
        """Constant factors on kept and clipped terms alike: sampler correction, off-policy mask."""
        weights = inputs.get("importance_sampling_ratio")
        threshold = self.args.off_policy_mask_threshold
        if threshold is not None:
            old = inputs.get("old_per_token_logps", logprobs.detach())
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
            kl = kl * importance_ratio(log_ratio) if self.args.use_bias_correction_kl else kl
            terms.append(self.args.beta * (kl * share).sum())
        if self.args.entropy_coef != 0.0:
            entropy = entropies.masked_fill(~loss_mask, 0.0).sum() / totals[1].clamp(min=1)
            terms.append(-self.args.entropy_coef * entropy * self.accelerator.num_processes)
        if aux_loss is not None:
            one = torch.ones_like(aux_loss, dtype=torch.bool)
            self._batch_metrics.add_mean("aux_loss", aux_loss, one)
            steps = self.args.gradient_accumulation_steps
            terms.append(self.router_aux_loss_coef * aux_loss / steps)
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
        self._update_seconds += time.perf_counter() - started - self._rollout_seconds
        self._rollout_seconds = 0.0
        if self.accelerator.sync_gradients:
            admitted = self._guards.admit(self._flush_metrics(), self._window)
            if not admitted:
                self._drop_gradients()
            self._trace.end_mini_batch(self._window, verdict=self._guards.verdict)
        return loss

    def _drop_gradients(self) -> None:
        """Skip a step: the optimizer passes over what has no gradient, the critic's buffer is cleared."""
        self.model.zero_grad(set_to_none=True)
        self._start_mini_batch()

    def _after_backward(self) -> None:
        """For subclasses that need another gradient once the micro-batch's graph is gone."""

    def _before_optimizer_step(self) -> None:
        """All gradients of the mini-batch are there; upstream clips the policy's afterwards."""
        if self.has_critic:
            self._finish_critic()

    def _finish_critic(self) -> None:
        """Reduce and clip the critic's gradient, which waits for the optimizer's step."""
        if self.accelerator.num_processes > 1:
            self._critic_grads.reduce(self._mean_over_processes)
        limit = self.args.critic_max_grad_norm
        limit = self.args.max_grad_norm if limit is None else limit
        norm = self._critic_grads.clip_(limit)
        self._batch_metrics.add_scalar("value/grad_norm", norm)

    def _flush_metrics(self) -> dict[str, float]:
        seconds, self._update_seconds = self._update_seconds, 0.0
        figures = self._batch_metrics.flush(self.accelerator.gather, seconds)
        for name, value in figures.items():
            self._metrics["train"][name].append(value)
        return figures
