"""The rollout half of `PPOTrainer`: from dataset rows to a batch with per-token advantages.

`_generate_and_score_completions` is upstream's name for one rollout batch. Here it is ours alone: of
upstream's body only the order of the steps is left.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from ..core import kl_penalty, sampler_correction
from ..rollout.batch import TurnBatch, build_turn_batch
from ..rollout.episode import Episode
from ..rollout.record import judged
from ._trl import disable_gradient_checkpointing, use_adapter
from .estimate import Estimates, EstimateSettings, estimate
from .forward import ActorCriticForward
from .host import Upstream, is_warming_up
from .loop import rewards
from .loop.batch import Batch, collate, full_sequence
from .loop.log import RolloutLog
from .loop.player import EpisodePlayer
from .loop.rollout import Rollout
from .loop.rows import Row
from .reports import RolloutMetrics
from .stale import StalePolicies
from .trace_record import TraceRecorder
from .turn_rewards import TurnRewardFuncs


class ActorCriticRollout(ActorCriticForward):
    """GRPOTrainer whose rollout batches carry turns, values, returns and per-token advantages."""

    has_critic: bool
    _upstream: Upstream
    _player: EpisodePlayer
    _turn_reward_funcs: TurnRewardFuncs
    _rollout_log: RolloutLog
    _reward_plan: rewards.RewardPlan
    _stale: StalePolicies
    _trace: TraceRecorder

    def _init_rollout_state(self) -> None:
        self._rollout_metrics = RolloutMetrics(values=self.has_critic)
        self._rollout_seconds = 0.0

    def _generate_and_score_completions(self, inputs: list[Row]) -> Batch:
        """One rollout batch: play, pad, logprobs, reference, score, turns, values, advantages, log."""
        started = time.perf_counter()
        with self._stale.playing() if self.model.training else nullcontext():
            rollout = self._play(inputs)
            batch = self._padded(rollout)
            sampled = (batch["completion_mask"] * batch["tool_mask"]).sum()
            batch["num_items_in_batch"] = self.accelerator.gather(sampled).sum()
            self._add_old_logprobs(batch)
            self._add_reference_logprobs(batch)
            everyones = self._ask_for_rewards(rollout)
        with torch.no_grad():
            scores, scored = self._scores(rollout)
            dtype = torch.promote_types(self.model.dtype, torch.float32)
            turns = build_turn_batch(
                rollout.episodes, rollout.turn_rewards, batch["completion_mask"], dtype
            )
            # In the precision of the tensors, and nothing for the turns of hidden episodes.
            paid = 0.0 if turns.turn_rewards is None else turns.turn_rewards.sum(dim=1)
            rollout.earnings = (scores + paid).tolist()
            batch["turn_index"] = turns.turn_index
            batch["loss_mask"] = turns.action_mask & scored.unsqueeze(1)
            self._correct_sampler(batch)
            kl = self._reward_kl(batch)
            estimates = self._advantages(batch, turns, scores, scored, kl)
        batch["values"], batch["returns"] = estimates.values, estimates.returns
        batch["advantages"], batch["value_mask"] = estimates.advantages, estimates.value_mask
        seconds = time.perf_counter() - started
        if self.model.training:
            self._rollout_seconds = seconds  # not part of the update's time
        self._log_rollout(rollout, everyones, batch, turns, scores, kl, estimates, seconds)
        return batch

    # ------------------------------------------------------------------------ playing

    def _play(self, inputs: list[Row]) -> Rollout:
        rollout = self._player.play(inputs, self._rollout_seed())
        if self.model.training and rollout.by_engine:
            self._guards.count_failures(rollout.episodes)
        return rollout

    def _rollout_seed(self) -> tuple[int, ...]:
        """Names a rollout of training: the same after a resume, another one for every batch."""
        # The 1 stands for nothing any more; without it runs of 0.1 would go on with other episodes.
        return (self.args.seed, 1, self.state.global_step)

    def _padded(self, rollout: Rollout) -> Batch:
        device, tokenizer = self.accelerator.device, self._upstream.tokenizer
        ended = rollout.ended({*self.eos_token_ids, tokenizer.pad_token_id})
        return collate(
            rollout.episodes,
            pad_token_id=tokenizer.pad_token_id,
            multiple_of=self.pad_to_multiple_of,
            device=device,
            has_logprobs=rollout.has_logprobs,
            hidden=[self.mask_truncated_completions and not whole for whole in ended],
        )

    # ----------------------------------------------------------------- log-probabilities

    def _add_old_logprobs(self, batch: Batch) -> None:
        """The log-probabilities of the policy that has played, where anything is compared with them.

        Where an optimizer step takes in all of a rollout, the policy has not moved before its update.
        """
        args = self.args
        moves = args.gradient_accumulation_steps % (args.steps_per_generation * self.num_iterations)
        if moves or self._corrects_sampler or args.kl_coef != 0.0 or args.rollout_staleness:
            batch["old_per_token_logps"] = self._logprobs_under(self.model, batch)

    def _add_reference_logprobs(self, batch: Batch) -> None:
        """Those of the reference policy, where a KL is measured."""
        if self.args.kl_coef == 0.0 and self.args.beta == 0.0:
            return
        if self.ref_model is not None:
            batch["ref_per_token_logps"] = self._logprobs_under(self.ref_model, batch)
            return
        policy = self.accelerator.unwrap_model(self.model)
        # A fresh adapter is switched off; of one that has learnt, upstream or we have made a copy.
        with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
            batch["ref_per_token_logps"] = self._logprobs_under(self.model, batch)

    def _logprobs_under(self, model: nn.Module, batch: Batch) -> Tensor:
        ids, mask, length = full_sequence(batch)
        kwargs = self.args.gradient_checkpointing_kwargs
        with torch.no_grad(), disable_gradient_checkpointing(self.model, kwargs):
            logprobs, _, _ = self._get_per_token_logps_and_entropies(
                model, ids, mask, length, batch_size=self.args.per_device_train_batch_size
            )
        return logprobs

    @property
    def _corrects_sampler(self) -> bool:
        return self.use_vllm and self.vllm_importance_sampling_correction

    def _correct_sampler(self, batch: Batch) -> None:
        """Constant weights for the gap between the policy and the engine that sampled for it."""
        if not self._corrects_sampler:
            return
        args = self.args
        level, form = args.vllm_importance_sampling_mode.split("_")
        ratio = sampler_correction(
            batch["old_per_token_logps"],
            batch["sampling_per_token_logps"],
            batch["turn_index"],
            "product" if level == "sequence" else level,  # TRL's, of the whole episode
            truncate=form == "truncate",
            clip_min=args.vllm_importance_sampling_clip_min,
            clip_max=args.vllm_importance_sampling_clip_max,
        )
        batch["importance_sampling_ratio"] = ratio

    def _reward_kl(self, batch: Batch) -> Tensor | None:
        """Per-token KL to the reference, [B, T]."""
        if self.args.kl_coef == 0.0:
            return None
        return kl_penalty(
            batch["old_per_token_logps"],
            batch["ref_per_token_logps"],
            self.args.kl_estimator,
            loss_mask=batch["turn_index"] >= 0,
        )

    # ------------------------------------------------------------------------- rewards

    def _ask_for_rewards(self, rollout: Rollout) -> Tensor:
        """Ask reward functions, then those of turns.

        Returns:
            The rewards of all processes' episodes, [W * B, F].
        """
        if rollout.by_engine:
            self._log_completion_extra("stop_reason", [_ending(e) for e in rollout.episodes])
        completions = rollout.completions(self._rollout_log.decode)
        ids = [episode.ids for episode in rollout.episodes]
        with self._reward_plan.asked.about(rollout.episodes), self._environments_of(rollout):
            everyones = self._calculate_rewards(
                rollout.columns(), rollout.prompts, completions, ids
            )
            for i, func in enumerate(self.reward_funcs):
                if isinstance(func, nn.Module) and bool(everyones[:, i].isnan().any()):
                    raise ValueError(
                        f"The reward model {self.reward_func_names[i]!r} returned NaN. Check its "
                        f"weights and dtype; a NaN would be taken for a missing reward."
                    )
            first = self.accelerator.process_index * len(ids)
            rollout.rewards = everyones[first : first + len(ids)]
            if self._turn_reward_funcs.funcs:
                self._turn_reward_funcs.pay(rollout, self.environments)
        return everyones

    @contextmanager
    def _environments_of(self, rollout: Rollout) -> Iterator[None]:
        """Upstream hands `environments` to reward functions, where they are tools'.

        Those of training stay on the trainer, as upstream leaves them: callers look at their state.
        """
        before = self.environments
        if self._rollout_plan.tools:
            self.environments: list[Any] | None = [episode.env for episode in rollout.episodes]
        try:
            yield
        finally:
            if not self.model.training:
                self.environments = before

    def _scores(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Episode scores [B], and which episodes have one: all-None rows do not train."""
        scores, scored = rewards.score(
            rollout,
            self.reward_weights,
            self._reward_plan.repeated,
            self.reward_func_names,
            rollout.ended(set(self.eos_token_ids)),
            self.args.missing_eos_penalty,
        )
        return scores, scored

    def _paid(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Rewards of all processes' episodes [W * B, F], and scores of this one's [B]."""
        everyones, (scores, _) = self._ask_for_rewards(rollout), self._scores(rollout)
        paid = rollout.turn_rewards or [[]] * len(scores)
        rollout.earnings = [s + sum(own) for s, own in zip(scores.tolist(), paid, strict=True)]
        return everyones, scores

    # ---------------------------------------------------------------------- advantages

    def _advantages(
        self, batch: Batch, turns: TurnBatch, scores: Tensor, scored: Tensor, kl: Tensor | None
    ) -> Estimates:
        """From scores [B] to per-token advantages, by way of the critic.

        Whether an episode is `scored`, [B], matters to those who compare episodes; `loss_mask` knows.
        """
        values, final_values = self._rollout_values(batch)
        return estimate(
            turns,
            scores.to(values.dtype),
            values,
            final_values,
            kl,
            batch["loss_mask"],
            self._estimate_settings(),
            self._sum_over_processes,
        )

    def _rollout_values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Values before each token [B, T] and after the last one [B], in bounded chunks."""
        with self.critic.active():
            values = self._values_of(batch, self._chunk_size())
        last = batch["completion_mask"].long().sum(dim=1, keepdim=True)
        return values[:, :-1], values.gather(1, last).squeeze(1)

    def _estimate_settings(self) -> EstimateSettings:
        args = self.args
        return EstimateSettings(
            gamma=args.gamma,
            # Warm-up regresses on Monte Carlo returns, which is GAE with lambda 1.
            lam=1.0 if self._warming_up else args.lam,
            advantage_level=args.advantage_level,
            kl_coef=args.kl_coef,
            whiten_rewards=args.whiten_rewards,
            whiten_advantages=args.whiten_advantages,
            bootstrap_truncated=args.bootstrap_truncated,
        )

    @property
    def _warming_up(self) -> bool:
        return is_warming_up(self)

    # ------------------------------------------------------------------------- the log

    def _log_rollout(
        self,
        rollout: Rollout,
        everyones: Tensor,
        batch: Batch,
        turns: TurnBatch,
        scores: Tensor,
        kl: Tensor | None,
        estimates: Estimates,
        seconds: float,
    ) -> None:
        """Write the rollout down; `everyones` rewards are those of all processes."""
        log = self._rollout_log
        log.lengths(rollout, {*self.eos_token_ids, self._upstream.tokenizer.pad_token_id})
        self._log_spread(log.rewards(everyones, self.reward_weights))
        shown = (estimates.advantages.sum(1) / batch["loss_mask"].sum(1).clamp(min=1)).contiguous()
        log.table(rollout, everyones, self.accelerator.gather(shown).tolist())
        log.means(rollout.metric_sums)
        log.pending_metrics()
        self._judge_unjudged(rollout)
        gather = self.accelerator.gather
        log.add(
            self._rollout_metrics.collect(
                batch, turns, scores, kl, estimates, rollout, seconds, gather
            )
        )
        self._trace.rollout(rollout, batch)

    def _log_spread(self, totals: Tensor) -> None:
        training = self.model.training
        per_prompt = self.num_generations if training else self.num_generations_eval
        self._rollout_log.spread(totals, per_prompt)

    def _judge_unjudged(self, rollout: Rollout) -> None:
        """Count who has used up turns or tokens as failed, where environments judge at all."""
        if not rollout.by_engine:
            return
        episodes = rollout.episodes
        own = sorted({str(e.env_type) for e in episodes if e.success is not None})
        verdicts = judged(
            [e.success for e in episodes],
            [e.stop_reason for e in episodes],
            [e.env_type for e in episodes],
            {kind for kinds in gather_object([own]) for kind in kinds},
        )
        for episode, success in zip(episodes, verdicts, strict=True):
            episode.success = success

    def _sum_over_processes(self, tensor: Tensor) -> Tensor:
        return self.accelerator.reduce(tensor, reduction="sum")

    def _mean_over_processes(self, tensor: Tensor) -> Tensor:
        return self.accelerator.reduce(tensor, reduction="mean")


def _ending(episode: Episode) -> str:
    reason = str(episode.stop_reason)
    return f"{reason}: {episode.error}" if episode.error else reason
