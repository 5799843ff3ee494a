"""Rollouts by a policy of a fixed number of updates ago, to simulate an asynchronous pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class StalePolicies:
    """Copies of the policy's weights before each of the last `staleness` updates, in main memory."""

    def __init__(self, parameters: Sequence[nn.Parameter], staleness: int) -> None:
        # FSDP2 replaces the parameters.
        self._parameters = list(parameters) if staleness else []
        self._staleness = staleness
        self._kept: deque[list[Tensor]] = deque(maxlen=staleness + 1)
        # `_kept` and the present weights.
        self._in_rollout: deque[list[Tensor]] | None = None

    @contextmanager
    def keeping_present(self) -> Iterator[None]:
        """Context manager of one rollout batch that stores a copy of the present weights."""
        if not self._staleness:
            yield
            return
        present = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]
        self._in_rollout = kept = deque([*self._kept, present], self._kept.maxlen)
        try:
            yield
        finally:
            self._in_rollout = None
        # A failed rollout is played again.
        self._kept = kept

    @contextmanager
    def past_weights(self) -> Iterator[None]:
        """Context manager in which the policy has its weights of `staleness` updates ago, or its first."""
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
        """Return the optimizer steps of the policy that plays at `step`, or None without staleness."""
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
        for parameter, value in zip(self._parameters, weights, strict=True):
            parameter.copy_(value)
