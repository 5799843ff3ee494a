"""Evaluation: `evaluate()` on held-out rows, counted over all episodes; see `docs/evaluation.md`.

Upstream's loop hands out the batches. Here an evaluation batch is played and scored, and that is all:
no values, no advantages, no loss. The figures are summed once, when all episodes are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from . import plan, rollout_engine
from ._trl import open_trackio
from .evaluation_figures import EvaluationRun, PlayedEpisode
from .evaluation_rows import COLUMN, Name, named_rows, take_names
from .evaluation_settings import evaluation_settings, undisturbed
from .forward import Batch, Logprobs
from .reporting import named_run
from .update_phase import ActorCriticUpdate


class AgentEvaluation(ActorCriticUpdate):
    """GRPOTrainer whose evaluation counts each episode once and leaves no trace in training."""

    num_generations_eval: int
    vllm_importance_sampling_correction: bool

    def _init_evaluation(self) -> None:
        self._run: EvaluationRun | None = None
        self._eval_prefix: str | None = None
        # Of the batch in play: per episode its sampled tokens, and whether the last one ends a turn.
        self._sampled: list[tuple[int, bool]] = []

    # ---------------------------------------------------------------- from outside

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Play the held-out rows and report what came of it; `docs/evaluation.md` lists the figures.

        Rows are played `num_generations_eval` times each, with the `eval_*` settings. The episodes
        follow from `seed`, the row and the weights, whatever the batch size and the number of
        processes, and training goes on as if nothing had happened.

        Args:
            eval_dataset: rows, or a dict of datasets by name, whose figures are then named
                `eval_<name>_...`. Default: the trainer's.
            ignore_keys: upstream's; without effect.
            metric_key_prefix: of the figures' names.

        Returns:
            The figures by name.
        """
        if not isinstance(eval_dataset, str):  # the name of one of the trainer's own
            plan.check_eval_dataset(eval_dataset, self._rollout_plan)
        self._open_trackio()
        outer, self._eval_prefix = self._eval_prefix, metric_key_prefix
        try:
            with self._guards.ending.saving(), undisturbed(self):
                return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        finally:
            self._eval_prefix = outer

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Upstream's, on a test dataset: the figures are in its `metrics`, named `test_...`."""
        self._open_trackio()
        with undisturbed(self):
            return super().predict(*args, **kwargs)

    def _open_trackio(self) -> None:
        with named_run(self.args, self._checkpoints.name_to_report()):
            open_trackio(self)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Upstream's loader, of one entry per episode that knows its row and repetition."""
        if eval_dataset is None and self.eval_dataset is None:
            raise ValueError(
                "`eval_dataset` is missing, so there is nothing to evaluate on. Pass it to evaluate(), "
                "or to the trainer."
            )
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        rows = self.eval_dataset[rows] if isinstance(rows, str) else rows
        self._set_signature_columns_if_needed()
        if COLUMN not in self._signature_columns:
            self._signature_columns.append(COLUMN)
        repetitions, self.num_generations_eval = self.num_generations_eval, 1
        args = self.args
        options = args.dataloader_drop_last, args.dataloader_persistent_workers
        # All rows count, and upstream would know a persistent loader of other rows by the same name.
        args.dataloader_drop_last = args.dataloader_persistent_workers = False
        try:
            return super().get_eval_dataloader(named_rows(rows, repetitions))
        finally:
            self.num_generations_eval = repetitions
            args.dataloader_drop_last, args.dataloader_persistent_workers = options

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The same for `predict`."""
        return self.get_eval_dataloader(test_dataset)

    # -------------------------------------------------------------------- the loop

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Upstream's loop over the batches; the figures are made at its end."""
        process = self.accelerator.process_index, self.accelerator.num_processes
        self._run = run = EvaluationRun(list(self.reward_func_names), bool(self.tools), process)
        try:
            with evaluation_settings(self):
                output = super().evaluation_loop(
                    dataloader, description, True, ignore_keys, metric_key_prefix
                )
        finally:
            self._run = None
        self._metrics["eval"].clear()  # means of batches
        figures = run.figures(gather_object)
        figures["num_tokens"] = self.state.num_input_tokens_seen
        output.metrics.update({f"{metric_key_prefix}_{k}": v for k, v in figures.items()})
        return output

    def prediction_step(
        self,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, None, None]:
        """Play one batch; there is no loss and nothing to predict."""
        self._prepare_inputs(inputs)
        return None, None, None

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        inputs, self._names = take_names(inputs)
        if self._run is None:
            return super()._generate_and_score_completions(inputs)
        names = self._run.running_names(len(inputs)) if self._names is None else self._names
        new = self._run.first_time(names, gather_object)
        self._repeated = {row for row, first in enumerate(new) if not first}
        correction = self.vllm_importance_sampling_correction
        self.vllm_importance_sampling_correction = (
            False  # of log-probabilities that there are none of
        )
        try:
            batch = self._play_and_score(inputs)
        finally:
            self.vllm_importance_sampling_correction = correction
        with torch.no_grad():
            self._add_turn_rewards(batch)
            scores, _ = self._scores(batch)
        self._count(names, scores.tolist())
        return batch

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Logprobs:
        if self._run is None:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        # Upstream wants them for the update alone.
        return torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device), None, None

    # ------------------------------------------------------------------- one batch

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        alone = self._engine is None and self._rollout_plan.user_func is None
        if self._run is None or self._names is None or not alone:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if rollout_engine.why_not_cached(self) is not None:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        seeds = [(*self._rollout_seed(), *name) for name in self._names]
        return rollout_engine.sample_answers(self, prompt_ids, seeds), None

    def _generate(self, prompts: list[Any]) -> Any:
        result = super()._generate(prompts)
        ids, masks = result[1], result[2]
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        counts = [len(row) for row in ids] if masks is None else [sum(mask) for mask in masks]
        self._sampled = [(n, row[-1] in ends) for n, row in zip(counts, ids, strict=True)]
        return result

    def _calculate_rewards(self, inputs: Any, prompts: Any, *args: Any, **kwargs: Any) -> Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, *args, **kwargs)
        if self._run is not None:
            weight = len(prompts) - len(self._repeated)
            for name, values in self._pending_metrics.items():
                self._run.add_sum(name, weight * sum(values) / len(values), weight)
        return rewards

    def _log_turn_rewards(self, sums: dict[str, tuple[float, int]]) -> None:
        if self._run is None:
            return super()._log_turn_rewards(sums)
        for name, (total, count) in sums.items():
            self._run.add_sum(name, total, count)

    def _count(self, names: list[Name], scores: list[float]) -> None:
        """Add the batch's episodes to the run, but for those that only fill it up."""
        assert self._run is not None
        rewards, paid = self._local_rewards.tolist(), self._record.turn_rewards
        if paid is not None:
            scores = [s + sum(turns) for s, turns in zip(scores, paid, strict=True)]
        self.last_scores = scores
        for row, name in enumerate(names):
            if row not in self._repeated:
                self._run.episodes.append(self._facts(row, name, scores[row], rewards[row]))

    def _facts(self, row: int, name: Name, score: float, rewards: list[float]) -> PlayedEpisode:
        episode = None if self._episodes is None else self._episodes[row]
        weights, sampled = self.reward_weights.tolist(), self._sampled[row]
        return PlayedEpisode.of(name, self._record, row, episode, sampled, score, rewards, weights)

    # ----------------------------------------------------------------------- files

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Upstream's log, whose table of completions takes the place of none of training's."""
        with self._table_of_its_own():
            super().log(logs, start_time)

    @contextmanager
    def _table_of_its_own(self) -> Iterator[None]:
        evaluates = self._eval_prefix is not None and self.log_completions
        if not evaluates or not self.accelerator.is_main_process:
            yield
            return
        folder = Path(self.args.output_dir) / "completions"
        table = folder / f"completions_{self.state.global_step:05d}.parquet"
        aside = table.with_suffix(".kept")
        if table.exists():
            table.rename(aside)
        try:
            yield
        finally:
            if table.exists():
                table.rename(folder / f"{self._eval_prefix}_{table.name}")
            if aside.exists():
                aside.rename(table)
