"""The source of rollouts by the current policy, or by the policy of some updates ago."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import TrainerState

from ..envs.base import Row
from .guards.endings import Ending
from .loop.player import EpisodePlayer
from .loop.rewards import EpisodeRewards
from .loop.rollout import Played, Scored
from .ppo_config import PPOConfig


class StalePolicies:
    """Copies of the policy's weights before each of the last `staleness` updates, in main memory.

    In rollout k, with a staleness of 1: [weights before update k - 1, which play; weights before update k].
    """

    def __init__(self, parameters: Sequence[nn.Parameter], staleness: int) -> None:
        # Keep no parameters without staleness: FSDP2 replaces them, and nothing reads them.
        self.parameters = list(parameters) if staleness else []
        self._staleness = staleness
        self._kept: deque[list[Tensor]] = deque(maxlen=staleness + 1)
        # During a rollout `_kept` and the current weights, without weights that are too old; else None.
        self._in_rollout: deque[list[Tensor]] | None = None

    @contextmanager
    def keeping_present(self) -> Iterator[None]:
        """Context manager of one rollout batch that stores a copy of the current weights."""
        if not self._staleness:
            yield
            return
        present = [parameter.detach().to("cpu", copy=True) for parameter in self.parameters]
        self._in_rollout = kept = deque([*self._kept, present], self._kept.maxlen)
        try:
            yield
        finally:
            self._in_rollout = None
        # An error skips this line, so that a repeated rollout uses the same weights.
        self._kept = kept

    @contextmanager
    def past_weights(self) -> Iterator[None]:
        """Context manager in which the policy has its first weights, or those of `staleness` updates ago."""
        if self._in_rollout is None:
            yield
            return
        present = self._in_rollout[-1]
        self._load(self._in_rollout[0])
        try:
            yield
        finally:
            self._load(present)

    def version(self, step: int, steps: int) -> int | None:
        """Return the optimizer steps taken by the policy that plays at `step`; None without staleness."""
        return max(0, step - self._staleness * steps) if self._staleness else None

    def state_dict(self) -> list[list[Tensor]]:
        """Return the weights of past updates, oldest first."""
        return list(self._kept)

    def load_state_dict(self, state: list[list[Tensor]]) -> None:
        """Restore the weights from a `state_dict`."""
        self._kept.clear()
        self._kept.extend(state)

    @torch.no_grad()
    def _load(self, weights: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters, weights, strict=True):
            parameter.copy_(value)


@dataclass(eq=False, repr=False)
class RolloutSource:
    """Plays a rollout batch and adds its rewards when the training loop calls `next`."""

    args: PPOConfig
    accelerator: Accelerator
    player: EpisodePlayer
    rewards: EpisodeRewards
    ending: Ending
    stale: StalePolicies

    def next(self, rows: list[Row], weights: Tensor, state: TrainerState) -> tuple[Played, Scored]:
        """Play one episode per row, and score the episodes; `weights`, [F]: one per reward function.

        Raises:
            RolloutInterrupted: a process has received a signal.
        """
        calls, ending = self.player.engine.calls, self.ending
        ending.abandon_rollout()
        # Several processes abandon a rollout together, after it was played.
        interrupt = calls.interrupt if self.accelerator.num_processes == 1 else lambda: None
        try:
            with ending.signals.interrupting(interrupt):
                rollout = self.play(rows, state.global_step)
        finally:
            calls.resume()
        ending.abandon_rollout()
        ending.count_failures(rollout.episodes)
        return rollout, self.rewards.score(rollout, weights, state)

    def play(self, rows: list[Row], step: int) -> Played:
        """Play one episode per row, now and on this thread."""
        version = self.stale.version(step, self.args.steps_per_rollout)
        begins = None if version is None else step
        # The model in memory samples, through a backend of `TurnSampler`.
        with self.stale.past_weights():
            return self.player.play(rows, self.seed(step), version=version, step=begins, training=True)

    def seed(self, step: int) -> tuple[int, int, int]:
        """Return the seed of the rollout whose training begins at optimizer step `step`."""
        # The number 1 is part of all seeds; another number would change every episode.
        return (self.args.seed, 1, step)

    def settle(self) -> None:
        """Block until no rollout runs on another thread."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager of a complete `train()`, for subclasses with threads."""
        yield
