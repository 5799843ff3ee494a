"""Rewards of episodes: calls of reward functions, and one score per episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...rollout.episode import Episode
from ..planning.data import PLACEHOLDER_PROMPT
from ..planning.rewards import RewardPlan
from .rollout import Played, Scored, Sums
from .turn_rewards import TurnRewardFuncs


@dataclass(eq=False, repr=False)
class EpisodeRewards:
    """Calls the reward functions and computes the scores of episodes.

    Attributes:
        call_funcs: the bridge's method of this name.
        names: names of the reward functions.
        end_ids: token ids that end a turn.
        columns: columns that are logged with the rollout's table.
    """

    call_funcs: Callable[..., Tensor]
    names: Sequence[str]
    plan: RewardPlan
    turn_funcs: TurnRewardFuncs
    decode: Callable[[list[int]], str]
    end_ids: set[int]
    columns: dict[str, list[Any]]
    process_index: int
    missing_eos_penalty: float | None
    shows_environments: bool

    def score(self, rollout: Played, weights: Tensor, trainer_state: Any) -> Scored:
        """Call all functions, and compute each episode's score; `weights`, [F], of the reward functions."""
        episodes = rollout.episodes
        if rollout.has_environment:
            self.columns["stop_reason"].extend(map(_ending, episodes))
        completions = rollout.completions(self.decode)
        ids = [e.completion_ids for e in episodes]
        # Reward models render all prompts, and a template may refuse the prompt of a failed episode.
        hidden = [e.conversational and not e.num_turns for e in episodes]
        prompts = [
            PLACEHOLDER_PROMPT if h else e.prompt for h, e in zip(hidden, episodes, strict=True)
        ]
        environments = [e.env for e in episodes] if self.shows_environments else None
        with self.plan.current.about(episodes):
            rows = rollout.rows_of_episodes()
            all_rewards = self.call_funcs(environments, rows, prompts, completions, ids)
            first = self.process_index * len(ids)
            rewards = all_rewards[first : first + len(ids)]
            by_turn, sums = None, Sums()
            if self.turn_funcs.funcs:
                by_turn, sums = self.turn_funcs.rewards(rollout, environments, trainer_state)
        return score(
            rollout,
            rewards,
            weights,
            self.plan.turn_sum,
            self.names,
            rollout.ended(self.end_ids),
            self.missing_eos_penalty,
            everyone=all_rewards,
            by_turn=by_turn,
            sums=sums,
        )


def _ending(episode: Episode) -> str:
    reason = str(episode.stop_reason)
    return f"{reason}: {episode.error}" if episode.error else reason


def score(
    rollout: Played,
    all_rewards: Tensor,
    weights: Tensor,
    turn_sum: int | None,
    names: Sequence[str],
    ended: Sequence[bool],
    missing_eos_penalty: float | None,
    *,
    everyone: Tensor | None = None,
    by_turn: list[list[float]] | None = None,
    sums: Sums | None = None,
) -> Scored:
    """Score episodes by their rewards, [B, F].

    An episode without any reward, of functions or of turns, does not train. `ended`: for each episode,
    whether its last token ends a turn; `missing_eos_penalty` is subtracted from episodes without such an end.
    `by_turn`: rewards by episode and turn; None: the episodes' own.
    """
    rewards, weights = all_rewards, weights.to(all_rewards.device)
    has_turns = [by_turn is not None or e.has_turn_rewards for e in rollout.episodes]
    if by_turn is None and any(has_turns):
        by_turn = [episode.turn_rewards for episode in rollout.episodes]
    if turn_sum is not None:
        others = torch.arange(rewards.size(1), device=rewards.device) != turn_sum
        if by_turn is None and not others.any():
            if not any(episode.num_turns for episode in rollout.episodes):
                raise ValueError("No episode has a turn: no agent has called its client.")
            raise ValueError(
                "No turn has a reward, and there are no `reward_funcs`. Pass reward_funcs or "
                "turn_reward_funcs, give rewards in `rollout_func` or the environment, or return a "
                "number from the agent."
            )
        rewards, weights = rewards[:, others], weights[others]
    scored = ~rewards.isnan().all(dim=1)
    if by_turn is not None:
        scored = scored | torch.tensor(has_turns, device=rewards.device)
    trains = [episode.trains for episode in rollout.episodes]
    scored = scored & torch.tensor(trains, device=rewards.device)
    scores = (rewards * weights).nansum(dim=1)
    if not bool(torch.isfinite(scores).all()):
        raise ValueError(
            f"A reward of {list(names)} is infinite in episode "
            f"{int((~torch.isfinite(scores)).nonzero()[0])} of the rollout batch; rewards must be finite."
        )
    if missing_eos_penalty is not None:
        cut = ~torch.tensor(ended, device=scores.device)
        scores = scores - missing_eos_penalty * cut
    everyone = all_rewards if everyone is None else everyone
    return Scored(all_rewards, everyone, by_turn, scores, scored, sums or {})
