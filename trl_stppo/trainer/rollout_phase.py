"""The rollout half of `PPOTrainer`: from dataset rows to a batch with per-token advantages.

Everything here runs once per rollout batch, inside GRPOTrainer's
`_generate_and_score_completions`; the update half is in `update_phase.py`.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from ..core import kl_penalty, sampler_correction
from ..rollout.batch import TurnBatch, build_turn_batch, ends_with_eos
from ..rollout.engine import RolloutEngine
from ..rollout.episode import Episode, rollout_result
from ..rollout.func import read_rollout
from ..rollout.record import RolloutRecord, judged
from . import plan, rollout_engine
from ._trl import disable_gradient_checkpointing
from .estimate import Estimates, EstimateSettings, estimate
from .evaluation_rows import Name
from .forward import ActorCriticForward, full_sequence
from .host import is_warming_up
from .reports import RolloutMetrics
from .stale import StalePolicies
from .turn_rewards import TurnRewardFuncs, turns_in_context

Batch = dict[str, Any]


class ActorCriticRollout(ActorCriticForward):
    """GRPOTrainer whose rollout batches carry turns, values, returns and per-token advantages."""

    has_critic: bool
    _rollout_plan: plan.RolloutPlan
    _engine: RolloutEngine | None
    _eval_engine: RolloutEngine | None
    _turn_reward_funcs: TurnRewardFuncs
    _stale: StalePolicies
    environments: list[Any] | None
    _repeated_reward: int | None
    _buffered_inputs: list[Batch] | None

    def _init_rollout_state(self) -> None:
        self._record = RolloutRecord()
        self._rows: list[Batch] = []
        self._columns: list[Batch] = []
        self._episodes: list[Episode] | None = None
        self._prompt_ids: list[list[int]] | None = None
        self._local_rewards = torch.zeros(0)
        self._rollout_metrics = RolloutMetrics(values=self.has_critic)
        self._rollout_seconds = 0.0
        # Names of the episodes of an evaluation batch; None where the rows are no evaluation data.
        self._names: list[Name] | None = None
        # Rows of an evaluation batch that only fill it up.
        self._repeated: set[int] = set()
        self.last_scores: list[float] = []

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        if self._prompt_ids is not None:
            return self._prompt_ids, None, {}
        return super()._tokenize_prompts(prompts)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        training = self.model.training
        result = super()._generate_single_turn(*args, **kwargs)
        if self.model.training != training:  # continuous batching leaves it in train mode
            self.model.train(training)
        return result

    def _play_episodes(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """The rollout_func that plays environments and tools."""
        engine = self._engine if self.model.training else self._eval_engine
        assert engine is not None
        assert self._engine is not None
        self._episodes, self._record = rollout_engine.play(self, engine, prompts)
        # Reward columns are known by the classes of the training environments.
        drivers = self._engine.drivers
        self._record.env_types = [drivers[e.name].type_name for e in self._episodes]
        if self._rollout_plan.tools:
            self.environments = [episode.env for episode in self._episodes]
        result = rollout_result(self._episodes)
        if self.tools:  # upstream asks `_tool_call_loop`; reward functions would get this one
            del result["env_mask"]
        if not rollout_engine.tells_logprobs(self):
            result["logprobs"] = None  # on all processes, also where no turn was sampled
        return result

    def _failed_rows(self) -> set[int]:
        """Episodes that leave nothing to be scored: no environment to ask, or not one turn."""
        return {e.row for e in self._episodes or [] if e.lost or not e.num_turns}

    def _rollout_seed(self) -> tuple[int, ...]:
        """Names this rollout: the same after a resume, another one for every training batch."""
        step = self.state.global_step
        if self.model.training:
            return (self.args.seed, 0, step, self._step % self.args.gradient_accumulation_steps)
        # Evaluations repeat their episodes, so that two of the same weights agree.
        return (self.args.seed, 1) if self._names is not None else (self.args.seed, 1, step)

    def _play_user_rollout(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """The user's rollout_func, with its turn record taken out and checked."""
        assert self._rollout_plan.user_func is not None
        return read_rollout(self._rollout_plan.user_func(prompts, trainer), self._record)

    def _tool_call_loop(
        self,
        prompts: Any,
        prompt_ids: Any,
        completion_ids: Any,
        completions: Any,
        logprobs: Any,
        images: Any,
        multimodal_fields: Any,
    ) -> tuple[Any, ...]:
        """Nothing is left to do: the engine has played the tools. Upstream's form of the result."""
        assert self._episodes is not None
        masks = rollout_result(self._episodes)["env_mask"]
        counts = (self._record.tool_calls, self._record.tool_failures)
        return masks, completions, completion_ids, logprobs, *counts, [[] for _ in prompt_ids]

    def _generate(self, prompts: list[Any]) -> Any:
        result = super()._generate(prompts)
        if self._record.turn_spans is None:  # nobody has played: an answer is one turn
            self._record.turn_spans = [[(0, len(ids))] for ids in result[1]]
        if self._episodes is None or isinstance(prompts[0], str):
            return result
        prompt_ids, completion_ids, mask, _, logprobs, extra, *images = result
        # Upstream decodes the whole completion as one message; the conversation is known.
        messages = [episode.messages for episode in self._episodes]
        return prompt_ids, completion_ids, mask, messages, logprobs, extra, *images

    def _calculate_rewards(self, inputs: Any, prompts: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self._episodes is not None:
            prompts = [episode.prompt for episode in self._episodes]
            ends = [
                str(episode.stop_reason) + (f": {episode.error}" if episode.error else "")
                for episode in self._episodes
            ]
            self._log_completion_extra("stop_reason", ends)
        rewards = super()._calculate_rewards(inputs, prompts, *args, **kwargs)
        for i, func in enumerate(self.reward_funcs):
            if isinstance(func, torch.nn.Module) and bool(rewards[:, i].isnan().any()):
                raise ValueError(
                    f"The reward model {self.reward_func_names[i]!r} returned NaN. Check its weights and "
                    f"dtype; a NaN would be taken for a missing reward."
                )
        first = self.accelerator.process_index * len(prompts)
        self._local_rewards = rewards[first : first + len(prompts)]
        return rewards

    def _play_and_score(self, inputs: list[dict[str, Any]]) -> Batch:
        """TRL's rollout batch, with the record of its turns beside it."""
        self._columns = inputs
        self._rows, self._prompt_ids = plan.rows_with_prompts(
            inputs, self._tokenizer, self._rollout_plan
        )
        self._record, self._episodes, self.environments = RolloutRecord(), None, None
        return super()._generate_and_score_completions(self._rows)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        """One rollout batch: TRL's, with turns, values and per-token advantages added."""
        mode = "train" if self.model.training else "eval"
        started = time.perf_counter()
        with self._stale.playing() if mode == "train" else nullcontext():
            batch = self._play_and_score(inputs)
            self._add_old_logprobs(batch)
        per_prompt = self.num_generations if mode == "train" else self.num_generations_eval
        if per_prompt == 1:
            self._metrics[mode].pop("frac_reward_zero_std", None)
        with torch.no_grad():
            turns = self._turns(batch)
            scores, scored = self._scores(batch)
            batch["turn_index"] = turns.turn_index
            batch["loss_mask"] = turns.action_mask & scored.unsqueeze(1)
            self._correct_sampler(batch)
            kl = self._reward_kl(batch)
            estimates = self._advantages(batch, turns, scores, scored, kl)
        batch["values"], batch["returns"] = estimates.values, estimates.returns
        batch["advantages"], batch["value_mask"] = estimates.advantages, estimates.value_mask
        seconds = time.perf_counter() - started
        if mode == "train":
            self._rollout_seconds = seconds  # not part of the update's time
        paid = 0.0 if turns.turn_rewards is None else turns.turn_rewards.sum(dim=1)
        self.last_scores = (scores + paid).tolist()
        self._log_rollout(mode, batch, turns, scores, kl, estimates, seconds)
        return batch

    def _turns(self, batch: Batch) -> TurnBatch:
        mask = batch["completion_mask"].bool()
        if "tool_mask" in batch:
            mask = mask & batch["tool_mask"].bool()
        ended = ends_with_eos(batch["completion_ids"], batch["completion_mask"], self.eos_token_ids)
        self._add_turn_rewards(batch)
        dtype = torch.promote_types(self.model.dtype, torch.float32)
        return build_turn_batch(self._record, mask, ended, dtype)

    def _add_turn_rewards(self, batch: Batch) -> None:
        """Add what `turn_reward_funcs` say of each turn to what the environment has paid for it."""
        if not self._turn_reward_funcs.funcs:
            return
        turns = turns_in_context(self._tokenizer, self._rows, batch, self._record, self._episodes)
        self._log_turn_rewards(
            self._turn_reward_funcs.pay(turns, self._record, self.state, self._repeated)
        )

    def _log_turn_rewards(self, sums: dict[str, tuple[float, int]]) -> None:
        """Log means, of sums and counts of this process by name."""
        mode = "train" if self.model.training else "eval"
        # Sorted, so that all processes reduce the same figure, also one that only some have.
        for name in sorted(set(gather_object(list(sums)))):
            own = torch.tensor(sums.get(name, (0.0, 0.0)), device=self.accelerator.device)
            total, count = self._sum_over_processes(own).tolist()
            if count:
                self._metrics[mode][name].append(total / count)

    def _turn_returns(self) -> list[float] | None:
        """What the turns of each episode have earned in the environment, None if nobody pays."""
        if self._record.turn_rewards is None:
            return None
        return [sum(rewards) for rewards in self._record.turn_rewards]

    def _scores(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Episode scores [B], and which episodes have one: all-None rows do not train."""
        rewards, weights = self._local_rewards, self.reward_weights.to(self._local_rewards.device)
        if self._repeated_reward is not None:
            keep = torch.arange(rewards.size(1), device=rewards.device) != self._repeated_reward
            rewards, weights = rewards[:, keep], weights[keep]
        scored = ~rewards.isnan().all(dim=1)
        if self._record.turn_rewards is not None:
            pays = self._record.pays_turns or [True] * len(rewards)
            scored = scored | torch.tensor(pays, device=rewards.device)
        if self._record.trains is not None:
            scored = scored & torch.tensor(self._record.trains, device=rewards.device)
        scores = (rewards * weights).nansum(dim=1)
        if not bool(torch.isfinite(scores).all()):
            raise ValueError(
                f"A reward of {self.reward_func_names} is infinite in episode "
                f"{int((~torch.isfinite(scores)).nonzero()[0])} of the rollout batch; rewards must be finite."
            )
        if self.args.missing_eos_penalty is not None:
            ended = ends_with_eos(
                batch["completion_ids"], batch["completion_mask"], self.eos_token_ids
            )
            scores = scores - self.args.missing_eos_penalty * (~ended)
        return scores, scored

    def _correct_sampler(self, batch: Batch) -> None:
        """Upstream knows the gap to the sampler per token and per episode; per turn it is ours."""
        level, form = self.args.vllm_importance_sampling_mode.split("_")
        if level == "turn" and "importance_sampling_ratio" in batch:
            batch["importance_sampling_ratio"] = sampler_correction(
                batch["old_per_token_logps"],
                batch["sampling_per_token_logps"],
                batch["turn_index"],
                level,
                truncate=form == "truncate",
                clip_min=self.args.vllm_importance_sampling_clip_min,
                clip_max=self.args.vllm_importance_sampling_clip_max,
            )
            self._log_correction(batch["importance_sampling_ratio"], batch["turn_index"] >= 0)

    def _log_correction(self, ratio: Tensor, mask: Tensor) -> None:
        """Put the weights that are used where upstream has just logged its own."""
        sums = self._sum_over_processes(torch.stack([(ratio * mask).sum(), mask.sum()]))
        low = self.accelerator.gather(ratio.masked_fill(~mask, torch.inf).min()).min()
        high = self.accelerator.gather(ratio.masked_fill(~mask, -torch.inf).max()).max()
        figures = self._metrics["train" if self.model.training else "eval"]
        for name, value in (("min", low), ("mean", sums[0] / sums[1]), ("max", high)):
            figures[f"sampling/importance_sampling_ratio/{name}"][-1:] = [value.item()]

    def _add_old_logprobs(self, batch: Batch) -> None:
        """The log-probabilities of the policy that has played, where they are needed and TRL has none."""
        needed = self.args.kl_coef != 0.0 or self.args.rollout_staleness
        if not needed or "old_per_token_logps" in batch:
            return
        ids, mask, length = full_sequence(batch)
        kwargs = self.args.gradient_checkpointing_kwargs
        with torch.no_grad(), disable_gradient_checkpointing(self.model, kwargs):
            batch["old_per_token_logps"], _, _ = self._get_per_token_logps_and_entropies(
                self.model, ids, mask, length, batch_size=self._chunk_size()
            )

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

    def _log_rollout(
        self,
        mode: str,
        batch: Batch,
        turns: TurnBatch,
        scores: Tensor,
        kl: Tensor | None,
        estimates: Estimates,
        seconds: float,
    ) -> None:
        self._judge_unjudged()
        figures = self._rollout_metrics.collect(
            batch,
            turns,
            scores,
            kl,
            estimates,
            self._record,
            seconds,
            self.accelerator.gather,
        )
        for name, value in figures.items():
            self._metrics[mode][name].append(value)
        shown = (estimates.advantages.sum(1) / batch["loss_mask"].sum(1).clamp(min=1)).contiguous()
        count = shown.numel() * self.accelerator.num_processes
        for _ in range(min(count, len(self._logs["advantages"]))):
            self._logs["advantages"].pop()  # upstream's are relative to a group
        self._logs["advantages"].extend(self.accelerator.gather(shown).tolist())

    def _judge_unjudged(self) -> None:
        """Count who has used up turns or tokens as failed, where environments judge at all."""
        if self._episodes is None:
            return
        record = self._record
        success, types = record.success or [], record.env_types or []
        own = sorted({kind for kind, said in zip(types, success, strict=True) if said is not None})
        judges = {kind for kinds in gather_object([own]) for kind in kinds}
        reasons = [episode.stop_reason for episode in self._episodes]
        record.success = judged(success, reasons, types, judges)

    def _exchange(self, said: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        """Three numbers of every process."""
        own = torch.tensor([said], device=self.accelerator.device)
        return [(a, b, c) for a, b, c in self.accelerator.gather(own).tolist()]

    def _sum_over_processes(self, tensor: Tensor) -> Tensor:
        return self.accelerator.reduce(tensor, reduction="sum")

    def _mean_over_processes(self, tensor: Tensor) -> Tensor:
        return self.accelerator.reduce(tensor, reduction="mean")
