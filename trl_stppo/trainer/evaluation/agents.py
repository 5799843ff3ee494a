"""Evaluation of a policy without a trainer, with the rewards and metrics of a trainer's evaluation."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import TrainerState

from ...errors import EnvironmentFailureError, NonFiniteError
from ...generation.sampling import SamplingSettings
from ...rollout.episode import Episode
from ...rollout.reward_funcs import CurrentEpisodes, guarded, name_of
from ...rollout.turns import RESERVED
from ..loop.player import raise_first
from ..loop.rollout import EpisodeKey
from ..planning.data import check_eval_dataset
from ..play import Player
from .metrics import EvaluationRun, PlayedEpisode


@dataclass
class Evaluation:
    """Evaluates a policy on held-out rows, divided among all processes."""

    player: Player  # plays the episodes
    sampling: SamplingSettings  # settings of token sampling
    seed: tuple[int, ...]  # seed of all episodes
    # Reward functions in TRL's form, besides the environment's rewards.
    reward_funcs: Sequence[Callable[..., Any]]
    weights: Sequence[float]  # one per reward function
    missing_eos_penalty: float | None = None  # subtracted if an episode's last turn was cut
    repetitions: int = 1  # episodes per row
    parallel: int = 8  # episodes in play at once, per process

    @property
    def names(self) -> list[str]:
        """Return the names of the reward functions."""
        return [name_of(func) for func in self.reward_funcs]

    def figures(self, rows: Any) -> dict[str, float]:
        """Play the rows; return the metrics of docs/evaluation.md without prefix, equal on all processes."""
        check_eval_dataset(rows, self.player.rollout)
        names = [(row, number) for row in range(len(rows)) for number in range(self.repetitions)]
        batches = [names[at : at + self.parallel] for at in range(0, len(names), self.parallel)]
        run = EvaluationRun(self.names)
        state, failure = PartialState(), None
        try:
            for batch in batches[state.process_index :: state.num_processes]:
                run.episodes += self._played(batch, [dict(rows[row]) for row, _ in batch])
        except (EnvironmentFailureError, NonFiniteError) as error:
            failure = error  # the other processes get it with the metrics
        raise_first(failure)
        return run.figures(gather_object)

    def _played(
        self, names: list[EpisodeKey], rows: list[dict[str, Any]]
    ) -> Iterator[PlayedEpisode]:
        episodes = self.player.play(rows, self.sampling, self.seed, names=names)
        columns = [self._call(func, rows, episodes) for func in self.reward_funcs]
        for func, column in zip(self.names, columns, strict=True):
            if len(column) != len(rows):
                raise ValueError(
                    f"The reward function {func!r} returned {len(column)} rewards for {len(rows)} episodes."
                )
        columns.append([episode.final_reward for episode in episodes])
        weights, renderer = [*self.weights, 1.0], self.player.renderer
        # In the precision of the trainers' reward sums, NaN for None.
        rewards = torch.tensor([[math.nan if r is None else r for r in c] for c in columns]).T
        scores = (rewards * torch.tensor(weights)).nansum(dim=1)
        if self.missing_eos_penalty is not None:
            cut = torch.tensor([not renderer.ended(episode.last.ids) for episode in episodes])
            scores = scores - self.missing_eos_penalty * cut
        ends = {*renderer.eos_token_ids, renderer.tokenizer.pad_token_id}
        for row, (name, episode) in enumerate(zip(names, episodes, strict=True)):
            score = scores[row].item() + sum(episode.turn_rewards)
            own, ended = rewards[row, :-1].tolist(), episode.last.ids[-1] in ends
            yield PlayedEpisode.of(name, episode, ended, score, own, self.weights)

    def _call(
        self, func: Callable[..., Any], rows: list[dict[str, Any]], episodes: list[Episode]
    ) -> list[float | None]:
        """Call a reward function; return one reward per episode, None for an episode without a reward."""
        decode = self.player.renderer.decode_action
        columns = {key: [row[key] for row in rows] for key in rows[0] if key not in RESERVED}
        if self.player.rollout.tools:
            columns["environments"] = [episode.env for episode in episodes]
        current = CurrentEpisodes()
        with current.about(episodes):
            rewards = guarded(func, current)(
                prompts=[e.prompt for e in episodes],
                completions=[e.messages if e.conversational else decode(e.ids) for e in episodes],
                completion_ids=[e.completion_ids for e in episodes],
                trainer_state=TrainerState(),
                log_extra=lambda column, values: None,
                log_metric=lambda name, value: None,
                **columns,
            )
            if inspect.iscoroutine(rewards):
                rewards = self.player.calls.run_async(rewards)
        return list(rewards)
