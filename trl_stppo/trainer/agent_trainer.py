"""Base of all trainers: it builds the parts of a run, and its GRPOTrainer methods call these parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias

import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from peft import PeftConfig, PeftModel
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Sampler
from transformers import (
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
)
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from ..envs.base import Row
from ..rollout.agent_driver import AgentFunc
from ..rollout.environments import Factory
from ..rollout.func import RolloutFunc
from ..rollout.reward_funcs import RewardFunc, numbered
from ..rollout.workers import RolloutInterrupted
from . import display
from ._trl import check_overrides, profiling_decorator, small_tiles
from .batch import UpdateData
from .bridge import Bridge
from .checkpoints.checkpoints import Checkpoints
from .checkpoints.reference import marks_of
from .checkpoints.run_state import RunState
from .contract import check_trl
from .describe import adapter_of, critic_of, processor_of, task
from .evaluation.evaluator import Evaluator
from .guards.endings import Ending
from .guards.steps import Guards
from .loop.forward import ForwardPasses, Logprobs
from .loop.log import RolloutLog
from .loop.rewards import EpisodeRewards
from .loop.turn_rewards import TurnRewardFuncs
from .optimizers import Optimizers, policy_parameters
from .overlap import OverlappedSource
from .planning import plan
from .planning.data import plan_data
from .planning.rewards import plan_rewards
from .ppo_config import PPOConfig
from .precision import check_precision
from .publisher import Publisher
from .recorder import TraceRecorder
from .rollouts import RolloutSource, StalePolicies
from .setup import images, models, players, readers
from .setup.run_plan import RunPlan
from .sharding import runtime
from .stabilizers import STABILIZERS
from .step import Step
from .training_loop import TrainingLoop

Model: TypeAlias = str | PreTrainedModel | PeftModel
Reward: TypeAlias = str | PreTrainedModel | RewardFunc
Rewards: TypeAlias = Reward | list[Reward]
Rows: TypeAlias = Dataset | IterableDataset
EvaluationRows: TypeAlias = Rows | DatasetDict | IterableDatasetDict | Mapping[str, Rows]
Tokenizer: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin
Tokenizers: TypeAlias = PreTrainedTokenizerBase | list[PreTrainedTokenizerBase]
Environments: TypeAlias = Factory | dict[str, Factory]


class AgentTrainer(Bridge):
    """GRPOTrainer whose methods delegate to the parts that the constructor builds."""

    loop_class = TrainingLoop

    def __init__(
        self,
        model: Model | None = None,
        reward_funcs: Rewards | None = None,
        args: PPOConfig | None = None,
        train_dataset: Rows | None = None,
        eval_dataset: EvaluationRows | None = None,
        processing_class: Tokenizer | None = None,
        reward_processing_classes: Tokenizers | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: PeftConfig | None = None,
        tools: list[Callable[..., object]] | None = None,
        rollout_func: RolloutFunc | None = None,
        environment_factory: Environments | None = None,
        *,
        reward_model: Rewards | None = None,
        value_model: Model | None = None,
        ref_model: Model | None = None,
        data_collator: object = None,
        turn_reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        eval_environment_factory: Environments | None = None,
        agent: AgentFunc | None = None,
    ) -> None:
        check_trl()
        plan.check_models(model, ref_model, reward_model, value_model)
        if args is None:
            args = self.config_class(f"{plan.model_name(model).split('/')[-1]}-{self._name}")
        plan.check_arguments(args, self.config_class, data_collator)
        check_overrides(self)
        rollout = plan.plan_rollout(args, environment_factory, rollout_func, tools, agent)
        evaluation = plan.plan_evaluation(args, eval_environment_factory, rollout)
        data = plan_data(args, train_dataset, eval_dataset, rollout, evaluation)
        model, processing_class, quantization_config = models.policy_to_go_on_with(
            model, processing_class, args, quantization_config, peft_config
        )
        critic = models.critic_to_go_on_with(value_model, args, self.has_critic)
        rewards = plan_rewards(
            args,
            reward_funcs,
            reward_processing_classes,
            reward_model,
            processing_class,
            rollout,
            data.columns,
            scores_turns=turn_reward_funcs is not None,
        )
        reference = models.plan_reference(args, model, ref_model, peft_config)
        run = RunPlan(
            args=args, rollout=rollout, evaluation=evaluation, data=data, rewards=rewards,
            reference=reference, critic=critic, model=model, processing_class=processing_class,
            quantization_config=quantization_config,
        )  # fmt: skip
        with run.building_upstream(self):
            super().__init__(
                callbacks=callbacks,
                optimizers=optimizers,
                peft_config=peft_config,
                tools=tools,
                rollout_func=rollout_func,
                **run.upstream_arguments(),
            )
        models.check_sharding(self, critic, reference)
        models.install_stop_token(self)
        self.reader = images.build_reader(self)
        self._build_models(run)
        self._build_players(run, turn_reward_funcs)
        self._build_run(run)
        self._build_loop(run)

    def _build_players(self, run: RunPlan, turn_funcs: RewardFunc | list[RewardFunc] | None) -> None:
        self._turn_reward_funcs = TurnRewardFuncs(
            turn_funcs, lambda call: self._player.engine.calls.run_async(call), self.text_tokenizer
        )
        context = readers.check_readers(self, run.rewards)
        self._player = players.build_player(self, run.rollout, run.evaluation, context)
        self.reward_funcs: list[RewardFunc] = run.rewards.with_environments(
            self.reward_funcs, self.reward_func_names
        )
        self.reward_func_names = numbered(self.reward_func_names)
        self._rewards = EpisodeRewards(
            self.call_reward_funcs,
            self.reward_func_names,
            run.rewards,
            turn_funcs=self._turn_reward_funcs,
            decode=self.decode,
            end_ids=set(self.eos_token_ids),
            columns=self.pending_columns,
            process_index=self.accelerator.process_index,
            missing_eos_penalty=run.args.missing_eos_penalty,
            shows_environments=bool(run.rollout.tools),
        )
        self._rollout_log = RolloutLog(
            self.accelerator,
            self.next_metrics["train"],
            self.next_table,
            self.pending_metrics,
            self.pending_columns,
            names=self.reward_func_names,
            decode=self.decode,
            end_ids=self.end_ids,
            num_generations=self.num_generations,
            uses_tools=bool(self.tools),
            has_critic=self.has_critic,
            sees=self.reader is not None,
        )

    def _build_models(self, run: RunPlan) -> None:
        args, accelerator = run.args, self.accelerator
        self.critic = critic = models.install_models(self, run.reference, run.critic)
        self._rounded_away = check_precision(self)
        trained = [parameter for _, parameter in policy_parameters(self.model, critic)]
        self._stale = StalePolicies(trained, args.rollout_staleness)
        stabilizers = [STABILIZERS[name](args) for name in args.stabilizers]
        self._optimizer_step = Step(args, accelerator, critic.parameters(), stabilizers)
        self._optimizers = Optimizers(
            args, accelerator, critic, self._optimizer_step, self.get_decay_parameter_names
        )
        own, multiple = AgentTrainer._get_per_token_logps_and_entropies, self.pad_to_multiple_of
        self._forward = ForwardPasses(
            accelerator, critic, lambda: self.policy_logprobs, own, multiple, self.reader
        )
        self._forward.probe(
            self.model, self.ref_model, compiles=args.torch_compile, has_aux=self.aux_loss_enabled
        )

    def _build_run(self, run: RunPlan) -> None:
        args, accelerator = run.args, self.accelerator
        policy = accelerator.unwrap_model(self.model)
        self._ending = Ending(
            accelerator,
            self.critic,
            self.save_checkpoint,
            lambda: self.inside_rollout,
            handles_signals=args.enable_jit_checkpoint,
        )
        figures = self.next_metrics["train"]
        self._guards = Guards(args, accelerator, self._ending, figures, has_critic=self.has_critic)
        stabilizers = self._optimizer_step.stabilizers
        self._run_state = RunState(
            self, self._optimizers, self._stale, stabilizers, self._guards, self._ending
        )
        self._checkpoints = Checkpoints(
            args,
            accelerator,
            self.train_dataset,
            self._run_state,
            self._guards,
            self._ending,
            marks_of(self),
            processor_of(self.processing_class),
            trainer=self.config_class.__name__,
            critic=critic_of(self.critic),
            adapter=adapter_of(policy),
        )
        engines = {"rollout batch": self._player.engine, "evaluation": self._player.eval_engine}
        limits = self._player.eval_engine.limits
        self._publisher = Publisher(self, self._checkpoints, run.rollout, limits)
        names = partial(task, policy, self.train_dataset, run.rollout)
        reporting = engines if accelerator.is_main_process else {}
        notes = self._forward.why_padded, self._rounded_away
        display.install_callbacks(self.callback_handler, names, notes, reporting)
        self.add_callback(self._ending)

    def _build_loop(self, run: RunPlan) -> None:
        args, accelerator = run.args, self.accelerator
        self._trace = TraceRecorder(
            args,
            self._player,
            self.text_tokenizer,
            accelerator,
            run={
                "trainer": self._name,
                "variant": getattr(args, "variant", None),
                "level": self.importance_sampling_level,
            },
            reward_names=self.reward_func_names,
            has_critic=self.has_critic,
        )
        if args.trace_episodes:
            self.add_callback(self._trace)
        playing = args, accelerator, self._player, self._rewards, self._ending, self._stale
        source = RolloutSource(*playing)
        # It is off by default; an overlap has a staleness of 1.
        if args.rollout_overlap:
            source = OverlappedSource(*playing, self._run_state.loader_ahead)
        self._evaluator = Evaluator(
            self,
            self._player,
            source,
            self._rewards,
            self._rollout_log,
            run.evaluation,
            self._trace,
        )
        self._loop = self.loop_class(
            self,
            source=source,
            player=self._player,
            forward=self._forward,
            step=self._optimizer_step,
            guards=self._guards,
            ending=self._ending,
            log=self._rollout_log,
            trace=self._trace,
        )

    def _generate_and_score_completions(self, inputs: list[Row]) -> UpdateData:
        return self._loop.rollout(inputs)

    @profiling_decorator
    def _prepare_inputs(self, generation_batch: list[Row]) -> UpdateData:
        return self._loop.micro_batch(lambda: self._generate_and_score_completions(generation_batch))

    def _compute_loss(self, model: nn.Module, inputs: UpdateData) -> torch.Tensor:
        return self._loop.loss(model, inputs)

    def training_step(self, *args: object, **kwargs: object) -> torch.Tensor:
        """Train on one micro-batch by upstream's method; end the mini-batch after its last micro-batch."""
        started = time.perf_counter()
        with small_tiles(self.accelerator.device):
            loss = super().training_step(*args, **kwargs)
        self._loop.end_micro_batch(loss, started)
        return loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Logprobs:
        upstream = super()._get_per_token_logps_and_entropies
        return self._forward.logprobs(upstream, *args, **kwargs)

    def evaluate(
        self,
        eval_dataset: EvaluationRows | str | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Play the held-out rows and return their metrics; `docs/evaluation.md` lists them.

        Each row is played `num_generations_eval` times with the `eval_*` settings. The episodes depend
        on `seed`, the row and the weights, not on the batch size or the number of processes. An
        evaluation does not change the state of training.

        Args:
            eval_dataset: rows, or a dict of datasets by name; the metrics of a dataset are then named
                `eval_<name>_...`. Default: the trainer's evaluation data.
            ignore_keys: upstream's argument; without effect.
            metric_key_prefix: prefix of the metrics' names.
        """
        saving = self._ending.saving()
        return self._evaluator.evaluate(
            super().evaluate, saving, eval_dataset, ignore_keys, metric_key_prefix
        )

    def get_eval_dataloader(self, eval_dataset: EvaluationRows | str | None = None) -> DataLoader:
        """Return upstream's dataloader over the evaluation rows, with one entry per episode."""
        self._set_signature_columns_if_needed()
        return self._evaluator.loader(super().get_eval_dataloader, eval_dataset)

    def get_test_dataloader(self, test_dataset: Rows) -> DataLoader:
        """Refuse `predict`, which differs from `evaluate` only for models with labels."""
        raise NotImplementedError("`predict` is not supported: call `evaluate(rows)`.")

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Run upstream's evaluation loop over a dataloader and return its metrics."""
        return self._evaluator.loop(super().evaluation_loop, *args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: list[Row], *args: object, **kwargs: object
    ) -> tuple[None, None, None]:
        """Play one evaluation batch; return None for loss, logits and labels."""
        self._evaluator.play(inputs)
        return None, None, None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log by upstream's method, with the training's mean loss as the final loss."""
        self._run_state.set_final_loss(logs)
        super().log(logs, start_time)

    def create_optimizer(self, *args: object, **kwargs: object) -> torch.optim.Optimizer:
        """Create upstream's optimizer, and add the critic's parameters to it if gradients are not sharded."""
        given, wrapped = self.optimizer, partial(super().create_optimizer, *args, **kwargs)
        try:
            return self._optimizers.create(wrapped, self.lr_scheduler)
        except ValueError:
            # Drop a refused optimizer, so that the next `train()` makes and checks another one.
            self.optimizer = given
            raise

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, and set FSDP2 to keep gradient sums and log-probabilities in float32."""
        super().create_accelerator_and_postprocess()
        runtime.keep_precision(self.accelerator)

    def _prepare_for_training(self, *args: object, **kwargs: object) -> object:
        with self._optimizers.preparing():
            prepared = super()._prepare_for_training(*args, **kwargs)
        if self.has_critic:
            kind = self.get_optimizer_cls_and_kwargs(self.args)
            self._optimizers.take_critic_out(self.model, self.optimizer, *kind)
        if self._optimizers.critic is not None:
            # Add this callback last, so that other callbacks see the critic's gradient before its step.
            self.add_callback(self._optimizers)
        return prepared

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: object, **kwargs: object
    ) -> TrainOutput:
        """Train from the start, or resume exactly where a checkpoint was written.

        Args:
            resume_from_checkpoint: folder of a checkpoint; True for the newest complete checkpoint in
                `output_dir`; "auto" for the same, or for a new run if `output_dir` has no checkpoint.
            *args: arguments of `transformers.Trainer.train`.
            **kwargs: keyword arguments of the same method.

        Returns:
            Upstream's `TrainOutput`. Its training loss is the mean over the whole run, also if resumed.

        Raises:
            CheckpointError: the checkpoint is incomplete, damaged, or of another kind of run. Nothing
                has been changed.
            RunLockError: another run is writing to `output_dir`. Nothing has been changed.
        """
        with self._loop.source.running(), ExitStack() as stack:
            # Write the record of an update that the run has not completed.
            stack.callback(self._trace.finish)
            return self._checkpoints.train(super().train, resume_from_checkpoint, *args, **kwargs)

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler | None:
        return self._run_state.notice(super()._get_train_sampler(dataset))

    def _init_training_state(
        self, max_steps: int, per_epoch: int, epochs: int, *args: object
    ) -> tuple[int, int]:
        self._run_state.begin()
        where = super()._init_training_state(max_steps, per_epoch, epochs, *args)
        return self._checkpoints.begin(where, self.state, max_steps, epochs)

    def _run_epoch(self, *args: object, **kwargs: object) -> None:
        try:
            super()._run_epoch(*args, **kwargs)
        except RolloutInterrupted:
            # The state before the rollout is saved already, so let upstream end the training.
            self.control.should_training_stop = True

    def _maybe_log_save_evaluate(self, *args: object, **kwargs: object) -> None:
        self._ending.postpone(self.control)
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self._run_state.load(super()._load_from_checkpoint, resume_from_checkpoint, model)
        # The next rollout sends the new weights to vLLM.
        self._last_loaded_step = -1

    def _load_best_model(self) -> None:
        self._run_state.load_best(super()._load_best_model)
        self._last_loaded_step = -1

    def _get_output_dir(self, trial: object = None) -> str:
        # While a checkpoint is written, upstream writes into the staging folder.
        return str(self._checkpoints.staging or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        self._publisher.save_checkpoint(super()._save_checkpoint, model, trial)

    def _finalize_training(self, *args: object) -> TrainOutput:
        if self._ending.postponed[1]:
            self.save_checkpoint()
        return self._publisher.finish(super()._finalize_training, *args)

    def _save(self, output_dir: str | None = None, state_dict: object = None) -> None:
        self._publisher.save(super()._save, output_dir, state_dict)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the policy, its tokenizer, its critic, and the agent's settings."""
        self._publisher.save_model(super().save_model, output_dir, _internal_call)

    def create_model_card(self, *args: object, **kwargs: object) -> None:
        """Write TRL's model card, with results and settings, as `README.md` in the output directory.

        The arguments are upstream's.
        """
        self._publisher.write_card(super().create_model_card, *args, **kwargs)

    def push_to_hub(self, *args: object, **kwargs: object) -> object:
        """Save the policy and upload it to the Hub, with critic, settings and model card.

        The arguments are those of `transformers.Trainer.push_to_hub` and of `create_model_card`.
        """
        return self._publisher.push(super().push_to_hub, *args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._publisher.push_from_checkpoint(super()._push_from_checkpoint, checkpoint_folder)
