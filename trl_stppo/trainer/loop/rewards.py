"""Rewards of episodes: calls of reward functions, and one score per episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerState

from ...rollout.episode import Episode
from ...rollout.images import with_pictures
from ...rollout.record import StopReason
from ..planning.data import PLACEHOLDER_PROMPT
from ..planning.rewards import RewardPlan
from .rollout import Played, Scored, Sums
from .turn_rewards import TurnRewardFuncs


@dataclass(eq=False, repr=False)
class EpisodeRewards:
    """Calls the reward functions and computes the scores of episodes.

    Attributes:
        call_funcs: returns the rewards of all processes, [W * B, F]; in training the bridge's method of
            this name.
        names: names of the reward functions.
        end_ids: token ids that end a turn.
        missing_eos_penalty: reward units, subtracted from episodes whose last token ends no turn.
        columns: columns that are logged with the rollout's table.
    """

    call_funcs: Callable[..., Tensor]
    names: Sequence[str]
    plan: RewardPlan
    decode: Callable[[list[int]], str]
    end_ids: set[int]
    missing_eos_penalty: float | None
    shows_environments: bool
    turn_funcs: TurnRewardFuncs | None = None
    columns: dict[str, list[Any]] | None = None
    process_index: int = 0

    def score(self, rollout: Played, weights: Tensor, trainer_state: TrainerState | None) -> Scored:
        """Call all functions, and compute each episode's score; `weights`, [F]: one per reward function."""
        episodes = rollout.episodes
        if rollout.has_environment and self.columns is not None:
            self.columns["stop_reason"].extend(map(_ending, episodes))
        completions = rollout.completions(self.decode)
        ids = [e.completion_ids for e in episodes]
        # Reward models render all prompts, and a template may refuse the prompt of a failed episode.
        hidden = [e.conversational and not e.num_turns for e in episodes]
        prompts = [
            PLACEHOLDER_PROMPT if h else with_pictures(e.prompt)
            for h, e in zip(hidden, episodes, strict=True)
        ]
        environments = [e.env for e in episodes] if self.shows_environments else None
        by_turn, sums = None, Sums()
        with self.plan.current.about(episodes):
            rows = rollout.rows_of_episodes()
            everyone = self.call_funcs(environments, rows, prompts, completions, ids)
            if self.turn_funcs is not None and self.turn_funcs.funcs:
                by_turn, sums = self.turn_funcs.rewards(rollout, environments, trainer_state)
        first = self.process_index * len(ids)
        rewards = everyone[first : first + len(ids)]
        has_turns = [by_turn is not None or e.has_turn_rewards for e in episodes]
        if by_turn is None and any(has_turns):
            by_turn = [episode.turn_rewards for episode in episodes]
        scores, known = self._sums(rollout, rewards, weights, has_turns)
        return Scored(rewards, everyone, by_turn, scores, known, sums)

    def _sums(
        self, rollout: Played, rewards: Tensor, weights: Tensor, has_turns: list[bool]
    ) -> tuple[Tensor, Tensor]:
        """Return each episode's weighted sum of rewards, and whether the episode has a reward and trains."""
        episodes, device = rollout.episodes, rewards.device
        weights = weights.to(device)
        if self.plan.turn_sum is not None:
            others = torch.arange(rewards.size(1), device=device) != self.plan.turn_sum
            if not any(has_turns) and not others.any():
                if not any(episode.num_turns for episode in episodes):
                    full = any(e.stop_reason is StopReason.TOKEN_BUDGET for e in episodes)
                    cause = "no agent has made a call that trains"
                    if full:
                        cause = "messages fill `max_completion_length` or the model's context; shorten them"
                    raise ValueError(f"No episode has a turn: {cause}.")
                raise ValueError(
                    "No turn has a reward, and there are no `reward_funcs`. Pass reward_funcs or "
                    "turn_reward_funcs, give rewards in `rollout_func` or the environment, or return a "
                    "number from the agent."
                )
            rewards, weights = rewards[:, others], weights[others]
        known = ~rewards.isnan().all(dim=1) | torch.tensor(has_turns, device=device)
        known = known & torch.tensor([episode.trains for episode in episodes], device=device)
        scores = (rewards * weights).nansum(dim=1)
        if not bool(torch.isfinite(scores).all()):
            raise ValueError(
                f"A reward of {list(self.names)} is infinite in episode "
                f"{int((~torch.isfinite(scores)).nonzero()[0])} of the rollout batch; rewards must be finite."
            )
        if self.missing_eos_penalty is not None:
            cut = ~torch.tensor(rollout.ended(self.end_ids), device=device)
            scores = scores - self.missing_eos_penalty * cut
        return scores, known


def _ending(episode: Episode) -> str:
    reason = str(episode.stop_reason)
    return f"{reason}: {episode.error}" if episode.error else reason
