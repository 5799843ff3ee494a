"""PPO with a critic, on GRPOTrainer's engine.

GRPOTrainer drives the loop (datasets, vLLM, trackers, Hub). What is ours, in the order in which a batch
meets it; here is how a trainer is built:

    rows          _generate_and_score_completions   rollout_phase.py, the steps of one rollout
      -> episodes _play                             loop/player.py, environments, tools, plain prompts
      -> batch    _padded                           loop/batch.py, its fields and shapes
      -> rewards  _ask_for_rewards, _scores         loop/rewards.py, turn_rewards.py
      -> values   _rollout_values                   the critic, before the update
      -> advantages _advantages                     estimate.py: rewards -> GAE -> whitening
    micro-batches _prepare_inputs                   update_phase.py, new mini-batches every epoch
      -> critic   _value_loss                       its gradient waits in a buffer of its own
      -> policy   _policy_loss                      clipped surrogate, plus extra terms
    step          training_step                     guards.py, optimizers.py: reduce, clip, log
    what upstream asks of the class                 hooks.py: evaluation, checkpoints, pushes

DeepSpeed and FSDP are in `engines.py`. `_trl.OVERRIDDEN` says which of upstream's methods are wrapped and
which are ours alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..models.critic import Critic, SharedCritic
from . import (
    build,
    citations,
    continuing,
    display,
    finite,
    plan,
    rollout_engine,
    text_only,
)
from ._trl import open_trackio, reference_needed
from .checkpointing import Checkpoints
from .describe import describe
from .evaluation import Evaluator
from .evaluation_settings import (
    check_best_metric,
    evaluation_settings,
    plan_evaluation,
    undisturbed,
)
from .guards import Guards
from .host import Upstream
from .loop.log import RolloutLog
from .loop.player import EpisodePlayer
from .loop.rewards import RewardPlan, plan_rewards
from .loop.sampler import TurnSampler
from .optimizers import Optimizers, policy_parameters
from .packages import check_packages
from .ppo_config import PPOConfig
from .publishing import Publisher
from .reporting import named_run
from .run_state import RunState
from .signals import without_upstreams
from .stale import StalePolicies
from .trace_record import TraceRecorder
from .turn_rewards import TurnRewardFuncs
from .update_phase import ActorCriticUpdate


class PPOTrainer(ActorCriticUpdate):
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
    has_critic = True
    # Upstream's form.
    _tag_names = ["trl", "ppo", "reinforcement-learning", "multi-turn"]  # noqa: RUF012
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
        eval_environment_factory: Any = None,
    ) -> None:
        args = (
            args if args is not None else plan.default_config(self.config_class, model, self._name)
        )
        plan.check_arguments(
            args, self.config_class, processing_class, data_collator, model, ref_model
        )
        plan.check_overrides(self)
        check_packages(args, model, quantization_config)
        plan.check_distinct(model=model, reward_model=reward_model, value_model=value_model)
        rollout = plan.plan_rollout(args, environment_factory, rollout_func, tools)
        train_dataset = plan.check_dataset(train_dataset, args, rollout)
        plan.check_eval_dataset(eval_dataset, rollout)
        evaluation = plan_evaluation(args, eval_environment_factory, rollout)
        check_best_metric(args, eval_dataset)
        model, processing_class, quantization_config = continuing.policy_to_go_on_with(
            model, processing_class, args, quantization_config, peft_config
        )
        given = continuing.critic_to_go_on_with(value_model, args, self.has_critic)
        rewards = plan_rewards(
            args,
            reward_funcs,
            reward_processing_classes,
            reward_model,
            processing_class,
            rollout,
            scores_turns=turn_reward_funcs is not None,
        )
        reference = build.plan_reference(args, model, ref_model, peft_config)
        self._rollout_plan = rollout
        with (
            reference_needed(args, reference.by_upstream, reference.model is not None),
            rewards.extended_weights(args),
            without_upstreams(args),
        ):
            super().__init__(
                model=model,
                reward_funcs=list(rewards.funcs),  # upstream appends those of environments
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=text_only.tokenizer_of(model, processing_class, args),
                reward_processing_classes=rewards.processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=peft_config,
                tools=tools,
                rollout_func=rollout_func,
                environment_factory=rollout.tool_environments,
            )
        with given.in_place(args):
            build.check_engine(self, given.model, reference, turn_reward_funcs)
        self.beta = args.beta  # no longer the sign that upstream's constructor has read
        self._upstream = Upstream(self)
        self._install_players(rewards, evaluation)
        self._turn_reward_funcs = TurnRewardFuncs(
            self,
            self._player.engine.calls,
            self._upstream.tokenizer,
            self._chunk_size(),
            turn_reward_funcs,
            turn_reward_processing_classes,
            args.turn_reward_weights,
        )
        with given.in_place(args):
            self._add_models(given, reference)
        self._install_parts()

    def _install_players(self, rewards: RewardPlan, evaluation: plan.RolloutPlan) -> None:
        """What plays the episodes, in training and in evaluation."""
        rollout, tokenizer = self._rollout_plan, self._upstream.tokenizer
        self._player = EpisodePlayer(
            self,
            self._upstream,
            TurnSampler(self, tokenizer, lambda *rows: self._generate_single_turn(*rows)),
            *rollout_engine.build_engines(self, tokenizer, rollout, evaluation),
            environments_ask=bool(rollout.text or rollout.tools),
        )
        self.reward_funcs: list[Any] = rewards.with_environments(
            self.reward_funcs, self.reward_func_names
        )
        self._reward_plan = rewards
        self._rollout_log = RolloutLog(
            self, self._upstream, lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
        )

    def _install_parts(self) -> None:
        """State of the run, and what watches it; needs the models."""
        self._init_rollout_state()
        self._init_update_state()
        self._run_state = RunState(self, self._upstream, self._optimizers, self._stale)
        run, limits = partial(describe, self, self._rollout_plan), self._player.eval_engine.limits
        self._checkpoints = Checkpoints(self, self._run_state, run)
        self._publisher = Publisher(self, self._upstream, self._checkpoints, run, limits)
        display.install_callbacks(self, self._rollout_plan, self._turn_reward_funcs.funcs)
        self._run_state.guards = self._guards = Guards(
            self,
            self._upstream,
            self._optimizers.critic_grads,
            last_checkpoint=lambda: self._checkpoints.last,
            save=lambda: self._save_checkpoint(self.model, trial=None),
        )
        self._evaluator = Evaluator(
            self,
            self._upstream,
            self._player,
            self._paid,
            self._rollout_log,
            self._rollout_plan,
            self._open_trackers,
            lambda rollout, prefix: self._trace.evaluated(rollout, self._padded, prefix),
        )
        self._run_state.trace = self._trace = TraceRecorder(self, self._upstream, self._player)

    def _open_trackers(self) -> None:
        with named_run(self.args, self._checkpoints.name_to_report()):
            open_trackio(self)

    def _add_models(self, given: continuing.GivenCritic, reference: build.ReferencePlan) -> None:
        """What stands beside the policy: reference, critic and, later, the critic's optimizer."""
        build.keep_trainable(self.model)
        build.install_reference(self, reference)
        build.install_stop_token(self)
        self.critic: Critic = build.build_critic(self, given.model, given.shared)
        finite.check_loaded(self)
        trained = [parameter for _, parameter in policy_parameters(self)]
        self._stale = StalePolicies(trained, self.args.rollout_staleness)
        self._optimizers = Optimizers(
            self, self._scales_updates, lambda optimizer: self._after_optimizer(optimizer)
        )

    # ---------------------------------------------------------------- optimizer

    def _scales_updates(self) -> bool:
        return False

    def _after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """For subclasses that need the policy's parameters."""

    # --------------------------------------------------------------- bookkeeping

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
