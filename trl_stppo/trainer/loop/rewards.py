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
from .rollout import Rollout
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

    def add_rewards(self, rollout: Rollout, trainer_state: Any) -> Tensor:
        """Add all functions' rewards to the rollout; return the rewards of all processes, [W * B, F]."""
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
            rollout.rewards = all_rewards[first : first + len(ids)]
            if self.turn_funcs.funcs:
                self.turn_funcs.add_rewards(rollout, environments, trainer_state)
        return all_rewards

    def scores(self, rollout: Rollout, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return each episode's score and whether it has one, [B] and [B] bool (see `score`)."""
        ended, turn_sum = rollout.ended(self.end_ids), self.plan.turn_sum
        return score(rollout, weights, turn_sum, self.names, ended, self.missing_eos_penalty)


def add_totals(rollout: Rollout, scores: Tensor) -> None:
    """Add each episode's total reward to the rollout: its score, from `scores` [B], plus its turn rewards."""
    turns = rollout.turn_rewards or [[]] * len(scores)
    rollout.totals = [s + sum(own) for s, own in zip(scores.tolist(), turns, strict=True)]


def _ending(episode: Episode) -> str:
    reason = str(episode.stop_reason)
    return f"{reason}: {episode.error}" if episode.error else reason


def score(
    rollout: Rollout,
    weights: Tensor,
    turn_sum: int | None,
    names: Sequence[str],
    ended: Sequence[bool],
    missing_eos_penalty: float | None,
) -> tuple[Tensor, Tensor]:
    """Return episode scores [B], in reward units without turn rewards, and [B] bool, True if scored.

    An episode without any reward, of functions or of turns, does not train. `ended`: for each episode,
    whether its last token ends a turn; `missing_eos_penalty` is subtracted from episodes without such an end.
    """
    rewards, weights = rollout.rewards, weights.to(rollout.rewards.device)
    if turn_sum is not None:
        others = torch.arange(rewards.size(1), device=rewards.device) != turn_sum
        if rollout.turn_rewards is None and not others.any():
            if not any(episode.num_turns for episode in rollout.episodes):
                raise ValueError("No episode has a turn: no agent has called its client.")
            raise ValueError(
                "No turn has a reward, and there are no `reward_funcs`. Pass reward_funcs or "
                "turn_reward_funcs, give rewards in `rollout_func` or the environment, or return a "
                "number from the agent."
            )
        rewards, weights = rewards[:, others], weights[others]
    scored = ~rewards.isnan().all(dim=1)
    if rollout.turn_rewards is not None:
        scored = scored | torch.tensor(rollout.has_turn_rewards, device=rewards.device)
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
    return scores, scored
