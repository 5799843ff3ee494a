"""How a rollout batch is dealt out: anew for every epoch, by mini-batches, in micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..host import Host, Upstream
from ..watching.metrics import MiniBatchMetrics
from .batch import Batch, deal, group_by_length, without_padding


class Totals(NamedTuple):
    """Of one mini-batch, over all processes; each [] in float32."""

    episodes: Tensor
    policy_tokens: Tensor
    value_tokens: Tensor


class MiniBatches:
    """Deals out the rollout batch in place of upstream's loop, which counts the micro-batches.

    Each epoch deals the episodes into mini-batches anew; the micro-batches of a mini-batch hold
    episodes of like lengths.
    """

    def __init__(self, host: Host, upstream: Upstream) -> None:
        self._host, self._upstream = host, upstream
        self._per_rollout = int(host.args.steps_per_generation or 1)
        self.window: list[Batch] = []
        self.metrics, self.seconds = MiniBatchMetrics(), 0.0
        self.totals = Totals(torch.zeros(()), torch.zeros(()), torch.zeros(()))

    def advance(self, play: Callable[[], Batch]) -> bool:
        """Play or deal anew where it is time to; returns whether a mini-batch begins."""
        upstream, accumulation = self._upstream, self._host.args.gradient_accumulation_steps
        per_rollout, step = self._per_rollout, upstream.step
        if step % (per_rollout * self._host.num_iterations) == 0 or upstream.buffer is None:
            upstream.buffer = deal([play()], per_rollout)
        elif step % per_rollout == 0:
            upstream.buffer = deal(upstream.buffer, per_rollout)
        if step % accumulation:
            return False
        # The buffer keeps its order, or the next shuffle would depend on how it was cut.
        first = step % per_rollout
        self.begin(group_by_length(upstream.buffer[first : first + accumulation]))
        return True

    def begin(self, window: list[Batch]) -> None:
        """Begin the mini-batch of these micro-batches."""
        counts = [
            torch.stack([torch.tensor(len(mask), device=mask.device), mask.sum(), values.sum()])
            for mask, values in ((batch["loss_mask"], batch["value_mask"]) for batch in window)
        ]
        totals = torch.stack(counts).sum(dim=0).float()
        self.window, self.totals = window, Totals(*self._host.accelerator.reduce(totals))

    @property
    def micro_batch(self) -> Batch:
        """The one that is due."""
        accumulation = self._host.args.gradient_accumulation_steps
        return without_padding(self.window[self._upstream.step % accumulation])

    @property
    def is_empty(self) -> bool:
        """Whether no token of the mini-batch trains policy or critic."""
        return not (self.totals.policy_tokens or self.totals.value_tokens)

    def flush(self) -> dict[str, float]:
        """Its metrics, over all processes; the time starts anew."""
        seconds, self.seconds = self.seconds, 0.0
        return self.metrics.flush(self._host.accelerator.gather, seconds)
