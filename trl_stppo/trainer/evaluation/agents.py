"""Evaluation of a policy without a trainer, with the rewards and metrics of a trainer's evaluation."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerState, set_seed

from ...errors import EnvironmentFailureError, NonFiniteError
from ...generation.sampling import SamplingSettings
from ...rollout.episode import Durations
from ...rollout.reward_funcs import CurrentEpisodes, guarded, name_of, turn_sums
from ...rollout.turns import RESERVED
from ..loop.player import raise_first
from ..loop.rewards import add_totals, score
from ..loop.rollout import Rollout
from ..planning.data import check_eval_dataset
from ..play import Player
from .metrics import EvaluationRun


def evaluated(
    player: Player,
    rows: Any,
    sampling: SamplingSettings,
    seed: tuple[int, ...],
    functions: Sequence[Callable[..., Any]],
    weights: Sequence[float],
    *,
    missing_eos_penalty: float | None,
    repetitions: int,
    parallel: int,
) -> dict[str, float]:
    """Play the rows on all processes, and return their metrics. For the arguments see `Agent.evaluate`.

    The global generators, which environments may use, start from the seed.
    """
    check_eval_dataset(rows, player.rollout)
    every = [(row, number) for row in range(len(rows)) for number in range(repetitions)]
    batches = [every[at : at + parallel] for at in range(0, len(every), parallel)]
    run = EvaluationRun([name_of(function) for function in functions])
    # The last two are the environment's rewards: of the episode, and the sum of its turns.
    factors, reader, ends = (
        [*weights, 1.0, 1.0],
        player.renderer,
        set(player.renderer.eos_token_ids),
    )
    state, failure = PartialState(), None
    set_seed(seed[0] + state.process_index)
    try:
        for names in batches[state.process_index :: state.num_processes]:
            part = [dict(rows[row]) for row, _ in names]
            episodes = player.play(part, sampling, seed, names=names)
            rollout = Rollout(part, episodes, Durations(), seed, False, names)
            rollout.rewards = _rewards(player, rollout, functions)
            penalty = run.reward_names, rollout.ended(ends), missing_eos_penalty
            add_totals(
                rollout, score(rollout, torch.tensor(factors), len(factors) - 1, *penalty)[0]
            )
            run.add(rollout, names, {*ends, reader.tokenizer.pad_token_id}, factors)
    except (EnvironmentFailureError, NonFiniteError) as error:
        # The other processes get it with the metrics.
        failure = error
    raise_first(failure)
    return run.figures(gather_object)


def _rewards(player: Player, rollout: Rollout, functions: Sequence[Callable[..., Any]]) -> Tensor:
    """Return the rewards of the functions and of the environment, [B, F + 2], NaN for None."""
    rows, episodes = rollout.rows, rollout.episodes
    arguments: dict[str, Any] = {k: [r[k] for r in rows] for k in rows[0] if k not in RESERVED}
    if player.rollout.tools:
        arguments["environments"] = [episode.env for episode in episodes]
    arguments |= {
        "prompts": [episode.prompt for episode in episodes],
        "completions": rollout.completions(player.renderer.decode_action),
        "completion_ids": [episode.completion_ids for episode in episodes],
        "trainer_state": TrainerState(),
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }
    current, columns = CurrentEpisodes(), list[list[float | None]]()
    with current.about(episodes):
        for function in functions:
            rewards = guarded(function, current)(**arguments)
            if inspect.iscoroutine(rewards):
                rewards = player.calls.run_async(rewards)
            columns.append(list(rewards))
            if len(columns[-1]) != len(rows):
                raise ValueError(
                    f"`{name_of(function)}` returned {len(columns[-1])} rewards for {len(rows)} episodes."
                )
        columns.append([episode.final_reward for episode in episodes])
        columns.append(turn_sums(current, None)(**arguments))
    return torch.tensor([[math.nan if r is None else r for r in c] for c in columns]).T
