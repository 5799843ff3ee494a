"""The source of rollouts that the current policy plays. `stale.py` has the sources of older policies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerState

from ..envs.base import Row
from .guards.endings import Ending
from .loop.player import EpisodePlayer
from .loop.rewards import EpisodeRewards
from .loop.rollout import Played, Scored
from .ppo_config import PPOConfig


@dataclass(eq=False, repr=False)
class RolloutSource:
    """Plays a rollout batch and adds its rewards when the training loop calls `next`."""

    args: PPOConfig
    accelerator: Accelerator
    player: EpisodePlayer
    rewards: EpisodeRewards
    ending: Ending

    def next(self, rows: list[Row], weights: Tensor, state: TrainerState) -> tuple[Played, Scored]:
        """Play one episode per row, and score the episodes; `weights`, [F], of the reward functions.

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
        return self.player.play(rows, self.seed(step), training=True)

    def keeping_weights(self) -> AbstractContextManager[None]:
        """Context manager of one rollout, up to the data of its update."""
        return nullcontext()

    def old_weights(self) -> AbstractContextManager[None]:
        """Context manager in which the policy has the weights that played."""
        return nullcontext()

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
