"""The training loop: all operations on a batch, in their order.

    rollout           rows -> episodes -> rewards -> batch -> log-probabilities -> advantages
    micro_batch       rollout batch -> mini-batches, shuffled again in every epoch -> micro-batches
    loss              the critic's loss, then the policy's: ratio, clip, stabilizers, extra terms
    end_micro_batch   metrics, and the verdict on the step

`agent_trainer.py` calls these methods from GRPOTrainer's hooks. `step.py` takes the gradients; transformers'
own loop clips the policy's gradient and steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter

import torch
from torch import Tensor, nn

from ..core import (
    ClippedSurrogate,
    aggregation_weights,
    clipped_surrogate,
    clipped_value_loss,
    default_cliprange,
    importance_ratio,
    kl_penalty,
    log_importance_ratio,
    turn_starts,
)
from ._trl import disable_gradient_checkpointing, use_adapter
from .batch import (
    NO_MINI_BATCH,
    Estimates,
    MiniBatch,
    Passes,
    Targets,
    Tokens,
    TurnBatch,
    UpdateData,
    build_turn_batch,
    update_data,
)
from .bridge import Bridge
from .guards.endings import Ending
from .guards.steps import Guards
from .loop.forward import ForwardPasses
from .loop.log import RolloutLog
from .loop.metrics import MiniBatchMetrics
from .loop.player import EpisodePlayer
from .loop.rollout import Played, Scored
from .loop.targets import critic_targets, group_targets, reference_kl, sampler_weights
from .optimizers import policy_parameters
from .planning.data import Row
from .recorder import TraceRecorder
from .rollouts import RolloutSource
from .shuffle import (
    deal,
    group_by_beginning,
    group_by_length,
    num_episodes,
    without_padding,
)
from .stabilizers import weighs
from .step import Step, Terms


@dataclass(eq=False, repr=False)
class TrainingLoop:
    """Rollout step and update step of PPO and GRPO."""

    host: Bridge
    source: RolloutSource
    player: EpisodePlayer
    forward: ForwardPasses
    step: Step
    guards: Guards
    ending: Ending
    log: RolloutLog
    trace: TraceRecorder

    def __post_init__(self) -> None:
        self.args, self.accelerator = self.host.args, self.host.accelerator
        self.weighing = [each for each in self.step.stabilizers if weighs(type(each))]
        self.region = self.step.region
        self.mini_batch = NO_MINI_BATCH
        # `seconds` is the mini-batch's duration, including a rollout before it.
        self.metrics, self.seconds, self.rollout_seconds = MiniBatchMetrics(), 0.0, 0.0

    def rollout(self, rows: list[Row]) -> UpdateData:
        """Make the data of one update: play, reward, pad, compare policies, estimate advantages, log.

        State that checkpoints hold is changed last, because a signal may abandon the rollout.
        """
        started, host = time.perf_counter(), self.host
        with self.source.stale.keeping_present():
            played, scored = self.source.next(rows, host.reward_weights, host.state)
            tokens = self.player.collate(played)
            dtype = torch.promote_types(host.model.dtype, torch.float32)
            turns = build_turn_batch(played.episodes, scored.turn_rewards, tokens["completion_mask"], dtype)
            with torch.no_grad():
                passes = self.passes(tokens)
                by_episode = passes.of_episodes(turns)
                estimates = self.estimates(by_episode, turns, scored)
            data = update_data(tokens, passes, estimates)
            self.ending.abandon_rollout()
            seconds = time.perf_counter() - started
            self.rollout_seconds += seconds
            self.report(played, scored, estimates, data, seconds)
        return data

    def report(
        self,
        played: Played,
        scored: Scored,
        estimates: Estimates,
        data: UpdateData,
        seconds: float,
    ) -> None:
        """Report a rollout, played and estimated in `seconds`, to guards, log, trace and trust region."""
        figures = self.log.rollout(played, scored, estimates, seconds, self.host)
        exact = self.player.sampler.is_exact
        if played.is_stale and exact is not None:
            gap = figures.get("sampling/sampling_logp_difference/mean", 0.0)
            self.guards.watch_sampler(gap, exact=exact)
        if self.region is not None:
            self.region.begin_update(estimates.targets.spread, trains=not self.is_warming_up)
        self.trace.rollout(played, scored, data, self.host.state.global_step)

    def passes(self, tokens: Tokens) -> Passes:
        """Make the passes over a rollout that its update needs."""
        with self.source.stale.past_weights():
            old = self.old_logprobs(tokens)
        start = values = final_values = None
        if self.region is not None and self.args.rollout_staleness > 0:
            start = self.logprobs_under(self.host.model, tokens)
        ref = self.ref_logprobs(tokens)
        if self.host.has_critic:
            values, final_values = self.rollout_values(tokens)
        sampled = tokens.get("sampling_per_token_logps")
        return Passes(old, start, ref, sampled, values, final_values)

    def old_logprobs(self, tokens: Tokens) -> Tensor | None:
        """Return the log-probabilities under the policy that played, if an update needs them."""
        args = self.args
        # If one optimizer step trains on the whole rollout, the policy has not changed before that step, so
        # loss, metrics and trace take its own log-probabilities.
        moves = args.steps_per_rollout > 1 or args.rollout_staleness > 0
        reads = self._corrects_sampler or args.kl_coef != 0.0
        return self.logprobs_under(self.host.model, tokens) if moves or reads else None

    def ref_logprobs(self, tokens: Tokens) -> Tensor | None:
        """Return the log-probabilities of the reference policy, if a KL to it is measured."""
        host = self.host
        if self.args.kl_coef == 0.0 and self.args.beta == 0.0:
            return None
        if host.ref_model is not None:
            return self.logprobs_under(host.ref_model, tokens)
        policy = self.accelerator.unwrap_model(host.model)
        # Switch a fresh adapter off, but use the copy "ref" of an adapter that was trained before.
        with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
            return self.logprobs_under(host.model, tokens)

    def logprobs_under(self, model: nn.Module, tokens: Tokens) -> Tensor:
        """Compute log-probabilities of a batch's tokens under a model, [N, T] nats, without a gradient."""
        host, args = self.host, self.args
        checkpointing = args.gradient_checkpointing_kwargs
        with torch.no_grad(), disable_gradient_checkpointing(host.model, checkpointing):
            return self.forward.policy(model, tokens, args.per_device_train_batch_size)[0]

    def rollout_values(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Compute the critic's values before each token [N, T] and after the last token [N], in chunks."""
        with torch.no_grad(), self.host.critic.active():
            values = self.forward.values(tokens, self.args.forward_batch_size)
        last = tokens["completion_mask"].long().sum(dim=1, keepdim=True)
        return values[:, :-1], values.gather(1, last).squeeze(1)

    @property
    def _corrects_sampler(self) -> bool:
        return self.host.use_vllm and self.host.vllm_importance_sampling_correction

    def estimates(self, passes: Passes, turns: TurnBatch, scored: Scored) -> Estimates:
        """Compute the estimates of an update from passes with a row per episode, its contexts joined."""
        mask = turns.action_mask & scored.counts.unsqueeze(1)
        of_sampler = sampler_weights(passes, turns, self.args) if self._corrects_sampler else None
        kl = reference_kl(passes, turns, self.args)
        targets = self.targets(passes, turns, mask, scored, kl)
        weights = None
        if self.weighing:
            own = [each.episode_weights(targets.advantages, mask) for each in self.weighing]
            weights = torch.stack(own).prod(dim=0)
        return Estimates(turns, passes, mask, kl, of_sampler, targets, weights)

    def targets(
        self, passes: Passes, turns: TurnBatch, mask: Tensor, scored: Scored, kl: Tensor | None
    ) -> Targets:
        """Compute advantages, and the critic's targets if there is a critic; `mask`: tokens that train."""
        if not self.host.has_critic:
            group = self.host.num_generations
            return group_targets(turns, scored, mask, self.args, group, self.accelerator)
        reduce, warms_up = self.accelerator.reduce, self.is_warming_up
        return critic_targets(passes, turns, mask, scored, kl, self.args, reduce, warms_up=warms_up)

    def micro_batch(self, play: Callable[[], UpdateData]) -> UpdateData:
        """Return the next micro-batch; call `play` for a new rollout batch if the last batch is used up."""
        host, accumulation = self.host, self.args.gradient_accumulation_steps
        per_epoch, place = int(self.args.steps_per_generation or 1), host.micro_step
        if place % self.args.micro_batches_per_rollout == 0 or host.rollout_buffer is None:
            with self.guards.around_rollout():
                host.rollout_buffer = deal([play()], per_epoch)
        elif place % per_epoch == 0:
            host.rollout_buffer = deal(host.rollout_buffer, per_epoch)
        if place % accumulation == 0:
            # Only copies are sorted: a sorted buffer would make the next shuffle depend on the split.
            first = place % per_epoch
            window = host.rollout_buffer[first : first + accumulation]
            regroup = group_by_length if self.forward.why_padded else group_by_beginning
            self.mini_batch = self.open_mini_batch(regroup(window))
            self.metrics = MiniBatchMetrics()
            self.step.begin(rests=self.mini_batch.is_empty)
        return without_padding(self.mini_batch.parts[place % accumulation])

    def open_mini_batch(self, parts: list[UpdateData]) -> MiniBatch:
        """Count the next mini-batch's episodes, turns and tokens over all processes; set its clip range."""
        episodes = torch.tensor(num_episodes(parts), device=parts[0]["loss_mask"].device)

        def count(mask: Callable[[UpdateData], Tensor]) -> Tensor:
            return torch.stack([mask(batch).sum() for batch in parts]).sum()

        turns = count(lambda batch: turn_starts(batch["turn_index"]) & batch["loss_mask"])
        policy, value = count(itemgetter("loss_mask")), count(itemgetter("value_mask"))
        local = torch.stack([episodes, turns, policy, value]).float()
        episodes, turns, policy, value = self.accelerator.reduce(local)
        # `epsilon_low` is TRL's name for `cliprange`.
        low, high = self.host.epsilon_low, self.host.epsilon_high
        # For token ratios, or with `epsilon_high`, the configuration has set it.
        if self.args.epsilon is None:
            ratios = turns if self.host.importance_sampling_level == "turn" else episodes
            low = high = default_cliprange(float(policy), float(ratios))
        return MiniBatch(parts, episodes, turns, policy, value, (low, high))

    @cached_property
    def _policy(self) -> list[tuple[str, nn.Parameter]]:
        """The policy's trained parameters. Read them once training has begun, because FSDP2 replaces them."""
        return policy_parameters(self.host.model, self.host.critic)

    @property
    def is_warming_up(self) -> bool:
        """Return whether the next optimizer step trains only the critic."""
        return self.host.state.global_step < self.args.critic_warmup_steps

    @property
    def step_of_rollout(self) -> int:
        """Return the index of the optimizer step within its rollout batch."""
        done = self.host.micro_step % self.args.micro_batches_per_rollout
        return int(done // self.args.gradient_accumulation_steps)

    def loss(self, model: nn.Module, inputs: UpdateData) -> Tensor:
        """Return a micro-batch's part of the mini-batch's loss; any split gives the same sum."""
        if self.step.rests:
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        size, has_aux = self.args.per_device_train_batch_size, self.host.aux_loss_enabled
        *pieces, last = self.forward.pieces(inputs, size, has_aux=has_aux)
        # Upstream makes the last backward pass, so only the last piece keeps its graph.
        done = [self.step.accumulate(model, partial(self.piece_loss, model, each)) for each in pieces]
        loss = sum(done, self.piece_loss(model, last))
        if self.is_warming_up:
            return loss
        # Set the factor before the last backward pass, because DeepSpeed steps inside it.
        if self.accelerator.sync_gradients:
            self.step.set_factor()
        faults, weighs_in = self.step.check_loss(loss)
        if faults:
            raise self.guards.cannot_skip(faults)
        # For a loss without a graph DeepSpeed makes no backward pass.
        return loss if weighs_in or not self.accelerator.sync_gradients else loss.detach()

    def piece_loss(self, model: nn.Module, inputs: UpdateData) -> Tensor:
        """Return the loss of some rows; add the critic's gradient to its buffer."""
        value_loss = torch.zeros((), device=self.accelerator.device)
        if self.host.has_critic:
            value_loss = self.args.vf_coef * self.value_loss(inputs)
        if self.is_warming_up:
            # The policy does not train, so its gradient stays None.
            return value_loss.requires_grad_()
        return self.policy_loss(model, inputs) + value_loss

    def value_loss(self, inputs: UpdateData) -> Tensor:
        """Return the critic's clipped loss, detached: the gradient goes into the critic's buffer."""
        value_mask, processes = inputs["value_mask"], self.accelerator.num_processes
        with self.host.critic.active():
            values = self.forward.values(inputs)[:, :-1]
            per_token, clipped = clipped_value_loss(
                values, inputs["values"], inputs["returns"], value_mask, self.args.cliprange_value
            )
            # The terms are 0 off the mask.
            loss = per_token.sum() / self.mini_batch.value_tokens.clamp(min=1) * processes
            self.step.critic_grads.add(self.args.vf_coef * loss)
        self.metrics.add_mean("value/loss", per_token, value_mask)
        self.metrics.add_mean("value/clip_fraction", clipped, value_mask)
        return loss.detach()

    def policy_loss(self, model: nn.Module, inputs: UpdateData) -> Tensor:
        """Return the clipped surrogate loss at the chosen ratio level, plus the terms that options add."""
        host, loss_mask = self.host, inputs["loss_mask"]
        logprobs, entropies, aux_loss = self.forward.policy(
            model, inputs, entropy=True, aux_loss=host.aux_loss_enabled
        )
        assert entropies is not None
        # A batch may lack the column until the first step after a rollout, as the policy is the old one.
        old = inputs.get("old_per_token_logps", logprobs.detach())
        level = host.importance_sampling_level
        log_ratio = log_importance_ratio(logprobs, old, inputs["turn_index"], level, loss_mask=loss_mask)
        surrogate = clipped_surrogate(
            log_ratio,
            inputs["advantages"],
            loss_mask,
            cliprange_low=self.mini_batch.clip_range[0],
            cliprange_high=self.mini_batch.clip_range[1],
            delta=self.args.delta,
            weights=self.token_factors(inputs, logprobs, old),
        )
        weights = self.accelerator.num_processes * aggregation_weights(
            loss_mask,
            host.loss_type,
            num_episodes=self.mini_batch.episodes,
            num_tokens=self.mini_batch.policy_tokens,
            max_length=host.max_completion_length,
            episode_tokens=inputs["episode_tokens"],
            dtype=surrogate.kept.dtype,
        )
        extra = self._extra_loss(inputs, logprobs, entropies, aux_loss, log_ratio, weights)
        surrogate = self.weigh_episodes(inputs, surrogate)
        terms = Terms(surrogate, weights, extra, logprobs, entropies, loss_mask)
        self.observe(inputs, terms, old, log_ratio)
        # Upstream does not divide the loss by the number of micro-batches, because GRPOTrainer sets
        # `loss_is_scaled_for_ga`.
        return self.step.add_policy(terms)

    def observe(self, inputs: UpdateData, terms: Terms, old: Tensor, log_ratio: Tensor) -> None:
        """Report a pass to metrics, trust region and trace."""
        self.metrics.add_pass(inputs, terms, packed=self.forward.was_packed)
        self.metrics.add_drift(inputs, terms.logprobs, old)
        if self.args.rollout_staleness and self.step_of_rollout == 0:
            # No step was taken yet, so these are log-probabilities of the policy before the update.
            change = (terms.logprobs - old).abs()
            self.metrics.add_mean("sampling/drift", change, terms.loss_mask)
        if self.region is not None:
            start = inputs.get("start_per_token_logps", old)
            self.region.observe(terms.logprobs, start, inputs["turn_index"], terms.loss_mask)
        self.trace.observe(inputs, terms.logprobs, old, log_ratio, terms.surrogate)

    def token_factors(self, batch: UpdateData, logprobs: Tensor, old: Tensor) -> Tensor | None:
        """Return the detached factors on the tokens' loss terms: sampler correction and off-policy mask."""
        weights = batch.get("importance_sampling_ratio")
        threshold = self.args.off_policy_mask_threshold
        if threshold is None:
            return weights
        sampled, mask = batch.get("sampling_per_token_logps", old), batch["loss_mask"]
        keep = self.host.get_off_policy_mask(
            batch["advantages"], logprobs, sampled, mask.to(logprobs.dtype), threshold
        )
        return (keep if weights is None else weights * keep).detach()

    def weigh_episodes(self, inputs: UpdateData, surrogate: ClippedSurrogate) -> ClippedSurrogate:
        """Multiply kept terms by the stabilizers' episode weights, if there are any; `objective` stays."""
        args, weights = self.args, inputs.get("episode_weights")
        if weights is None:
            return surrogate
        if not (args.beta or args.entropy_coef or self.host.aux_loss_enabled):
            self.step.add_weights(weights)
        self.metrics.add_episode_weights(weights, inputs["loss_mask"].any(dim=1))
        kept = surrogate.kept
        return surrogate._replace(kept=kept * weights.unsqueeze(1).to(kept.dtype))

    def _extra_loss(
        self,
        inputs: UpdateData,
        logprobs: Tensor,
        entropies: Tensor,
        aux_loss: Tensor | None,
        log_ratio: Tensor,
        weights: Tensor,
    ) -> Tensor | None:
        """Return the sum of loss-side KL, entropy bonus and router loss; None if all are off."""
        terms, args, loss_mask = [], self.args, inputs["loss_mask"]
        if args.beta != 0.0:
            kl = kl_penalty(logprobs, inputs["ref_per_token_logps"], "k3", loss_mask=loss_mask)
            self.metrics.add_mean("kl", kl, loss_mask)
            kl = kl * importance_ratio(log_ratio) if args.use_bias_correction_kl else kl
            terms.append(args.beta * (kl * weights).sum())
        if args.entropy_coef != 0.0:
            entropy = entropies.masked_fill(~loss_mask, 0.0).sum()
            entropy = entropy / self.mini_batch.policy_tokens.clamp(min=1)
            terms.append(-args.entropy_coef * (entropy * self.accelerator.num_processes))
        if aux_loss is not None:
            # The router's loss has a gradient from all tokens of a row, as in upstream.
            counts = torch.ones_like(aux_loss).bool()
            self.metrics.add_mean("aux_loss", aux_loss, counts)
            coefficient = self.host.router_aux_loss_coef
            terms.append(coefficient * aux_loss / args.gradient_accumulation_steps)
        return sum(terms[1:], terms[0]) if terms else None

    def end_micro_batch(self, loss: Tensor, started: float) -> None:
        """End a micro-batch begun at `started`; after the last of a mini-batch, judge and log the step."""
        self.step.losses.append(loss)
        ends = self.accelerator.sync_gradients
        report = self.step.close(self._policy, warms_up=self.is_warming_up) if ends else None
        self.seconds += time.perf_counter() - started
        if report is None:
            return
        gather = self.accelerator.gather
        self.ending.agree(gather(self.ending.received().unsqueeze(0)).tolist())
        seconds = self.seconds - self.rollout_seconds
        self.seconds = self.rollout_seconds = 0.0
        figures = self.metrics.flush(gather, seconds) | report.figures
        self.log.add(figures)
        verdict = self.guards.judge(
            report,
            figures.get("policy/approx_kl"),
            is_empty=self.mini_batch.is_empty,
            warms_up=self.is_warming_up,
        )
        ends_update = not self.host.inside_rollout
        self.step.apply(verdict, self.host.model, ends_update=ends_update)
        if self.region is not None:
            self.log.set(self.region.figures())
        self.trace.end_mini_batch(self.mini_batch, outcome=verdict, is_last=ends_update)
