"""Evaluation on held-out rows by a trainer's `evaluate()` (see `docs/evaluation.md`)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from accelerate.utils import gather_object, set_seed
from datasets import Dataset
from torch.utils.data import DataLoader, SequentialSampler
from transformers.trainer_utils import EvalLoopOutput

from ...envs.base import Row
from .._trl import new_token_limit, open_trackio, replaced
from ..bridge import Bridge
from ..guards.endings import random_states, set_random_states
from ..loop.log import RolloutLog, played_episodes
from ..loop.player import EpisodePlayer, seed_batch
from ..loop.rewards import EpisodeRewards
from ..loop.rollout import EpisodeKey, Played, Scored
from ..planning.data import EvaluationRows, check_eval_dataset
from ..planning.plan import RolloutPlan
from ..recorder import TraceRecorder
from ..rollouts import RolloutSource
from .metrics import EvaluationRun

# Column of a dataloader's rows with the episode's name; environments and functions never get it.
COLUMN = "_evaluation_episode"


@dataclass(eq=False, repr=False)
class Evaluator:
    """Runs a trainer's evaluations without changing the state of training."""

    host: Bridge
    player: EpisodePlayer
    source: RolloutSource
    rewards: EpisodeRewards
    log: RolloutLog
    rollout_plan: RolloutPlan
    trace: TraceRecorder
    run: EvaluationRun | None = None
    prefix: str = "eval"

    def evaluate(
        self,
        wrapped: Callable[..., dict[str, float]],
        saving: AbstractContextManager[None],
        eval_dataset: EvaluationRows | str,
        ignore_keys: list[str] | None,
        prefix: str,
    ) -> dict[str, float]:
        """Check the rows and run upstream's `evaluate`, isolated from the state of training."""
        if self.rewards.plan.current.episodes:
            raise RuntimeError("`evaluate` was called inside a reward function.")
        # A string names one of the trainer's own data sets, which the constructor has checked.
        if not isinstance(eval_dataset, str):
            check_eval_dataset(eval_dataset, self.rollout_plan)
        open_trackio(self.host)
        self.source.settle()
        with saving, undisturbed(self.host):
            return wrapped(eval_dataset, ignore_keys, prefix)

    def loader(
        self, wrapped: Callable[[object], DataLoader], eval_dataset: EvaluationRows | str
    ) -> DataLoader:
        """Return upstream's loader with one entry per episode, named by row and repetition."""
        host = self.host
        if eval_dataset is None and host.eval_dataset is None:
            raise ValueError("`eval_dataset` is missing: pass it to evaluate(), or to the trainer.")
        rows = host.eval_dataset if eval_dataset is None else eval_dataset
        rows = host.eval_dataset[rows] if isinstance(rows, str) else rows
        if COLUMN not in host.signature_columns:
            host.signature_columns.append(COLUMN)
        # An evaluation plays and counts all rows, also the rows of a stream.
        listed = rows if hasattr(rows, "__len__") else list(rows)
        named = NamedRows(listed, host.num_generations_eval)
        # All rows count, so drop none. With persistent workers upstream would reuse a loader of other rows.
        options = {"dataloader_drop_last": False, "dataloader_persistent_workers": False}
        # `Agent.evaluate` plays in this order too, on which `generate` and environments may depend.
        order = {"num_generations_eval": 1, "_get_eval_sampler": SequentialSampler}
        with replaced(host, **order), replaced(host.args, **options):
            return wrapped(named)

    def loop(
        self,
        wrapped: Callable[..., EvalLoopOutput],
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run upstream's evaluation loop, and add this package's metrics to its output."""
        host = self.host
        process, processes = host.accelerator.process_index, host.accelerator.num_processes
        rows: Any = dataloader.dataset
        total = -(-len(rows) // processes)
        run = EvaluationRun(list(host.reward_func_names), bool(host.tools), process, total)
        with replaced(self, run=run, prefix=metric_key_prefix), evaluation_settings(host):
            output = wrapped(dataloader, description, True, ignore_keys, metric_key_prefix)
        figures = run.figures(gather_object)
        figures["num_tokens"] = host.state.num_input_tokens_seen
        output.metrics.update({f"{metric_key_prefix}_{k}": v for k, v in figures.items()})
        return output

    def play(self, inputs: list[Row]) -> tuple[Played, Scored]:
        """Play and score a batch of rows; during an evaluation, also count its episodes."""
        seed, run, training = self.host.args.seed, self.run, self.host.model.training
        step = self.host.state.global_step
        rows = [{k: v for k, v in row.items() if k != COLUMN} for row in inputs]
        if run is None:
            rollout = self.player.play(rows, (seed, 1, step), None, training=training)
            return rollout, self._score(rollout)
        names = [(int(row[COLUMN][0]), int(row[COLUMN][1])) for row in inputs]
        # Evaluations reuse their seeds, so that two evaluations of the same weights agree.
        seed_batch((seed, 1), names)
        first = run.mark_new(names, gather_object)
        repeated = frozenset(number for number, new in enumerate(first) if not new)
        with self._counting_all(run):
            rollout = self.player.play(rows, (seed, 1), names, repeated, training=training)
        scored = self._score(rollout)
        self.log.table(rollout, scored.everyone, [0.0] * len(scored.everyone))
        self.trace.evaluated(rollout, scored, self.prefix, step)
        self._count(run, rollout, scored, names)
        return rollout, scored

    @contextmanager
    def _counting_all(self, run: EvaluationRun) -> Iterator[None]:
        """Context manager of a batch that reports progress with the episodes of all batches."""
        engine, done = self.player.eval_engine, len(run.episodes)
        report, before = engine.on_progress, sum(episode.turns for episode in run.episodes)

        def overall(ended: int, episodes: int, turns: int) -> None:
            report(done + ended, max(run.total, done + episodes), before + turns)

        with replaced(engine, on_progress=overall):
            yield

    def _score(self, rollout: Played) -> Scored:
        return self.rewards.score(rollout, self.host.reward_weights, self.host.state)

    def _count(self, run: EvaluationRun, rollout: Played, scored: Scored, names: list[EpisodeKey]) -> None:
        """Add the results of a played batch to the evaluation, without repeated padding episodes."""
        host, weight = self.host, len(names) - len(rollout.repeated)
        for metric, values in self.host.pending_metrics.items():
            run.sums.append((metric, weight * sum(values) / len(values), weight))
        self.host.pending_metrics.clear()
        run.sums += ((metric, *pair) for metric, pair in (rollout.sums | scored.sums).items())
        weights = host.reward_weights.tolist()
        run.episodes += played_episodes(rollout, scored, names, host.end_ids, weights)


class NamedRows:
    """View of rows that contains each row `repetitions` times, with an episode name in each entry."""

    def __init__(self, dataset: Dataset | list[Row], repetitions: int) -> None:
        self._dataset, self._repetitions = dataset, repetitions

    def __len__(self) -> int:
        return len(self._dataset) * self._repetitions

    def __getitem__(self, index: int) -> Row:
        row, repetition = divmod(index, self._repetitions)
        return {**self._dataset[row], COLUMN: [row, repetition]}


@contextmanager
def undisturbed(host: Bridge) -> Iterator[None]:
    """Context manager that seeds by `args.seed`, then restores random states, metrics and mode."""
    log = [(container, copy.copy(container)) for container in host.next_log]
    training, states = host.model.training, random_states(host.accelerator.device)
    try:
        for container, _ in log:
            container.clear()
        set_seed(host.args.seed, device_specific=True)
        yield
    finally:
        set_random_states(states)
        for container, before in log:
            container.clear()
            (container.update if isinstance(container, dict) else container.extend)(before)
        if host.model.training != training:
            host.model.train(training)


@contextmanager
def evaluation_settings(host: Bridge) -> Iterator[None]:
    """Context manager that applies `eval_generation_kwargs`, and sets `num_generations_eval` to 1."""
    sampling = dict(host.args.eval_settings)
    length = sampling.pop("max_completion_length", None)
    with ExitStack() as stack:
        if sampling:
            stack.enter_context((_vllm_sampling if host.use_vllm else _sampling)(host, sampling))
        if length is not None:
            stack.enter_context(new_token_limit(host, length))
        stack.enter_context(replaced(host, num_generations_eval=1))
        yield


def _sampling(host: Bridge, sampling: dict[str, object]) -> AbstractContextManager[None]:
    """Context manager that applies sampling settings to generation with transformers."""
    if sampling.get("temperature") == 0.0:
        sampling = {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None}
    elif "temperature" in sampling:
        sampling = {**sampling, "do_sample": True}
    config, kwargs = copy.deepcopy(host.generation_config), {**host.generation_kwargs, **sampling}
    for name, value in sampling.items():
        setattr(config, name, value)
    return replaced(host, generation_config=config, generation_kwargs=kwargs)


def _vllm_sampling(host: Bridge, sampling: dict[str, object]) -> AbstractContextManager[None]:
    """Context manager that applies sampling settings to vLLM; temperature 0 takes the likeliest token."""
    vllm = host.vllm_generation
    others = {k: v for k, v in vllm.generation_kwargs.items() if k not in sampling}
    return replaced(vllm, **sampling, generation_kwargs=others)
