"""The critic beside an engine: who adds up its gradient and steps it, and how it is saved whole.

`prepare` is called once, when the engine has the policy. What it returns is all that the loop knows:
the loss calls `add`, the end of a mini-batch `reduce`, `clip_` and `step`, the guards `norm`. An engine
that shards the critic puts objects of its own in their places, and lets `Critic.values` enter by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..gradients.buffers import GradientBuffer
from ..host import Host
from .runtime import CriticOptimizer

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def prepare(
    host: Host, make: MakeOptimizer, rate: Callable[[], float | Tensor]
) -> tuple[GradientBuffer, CriticOptimizer]:
    """The gradient of the critic, and what steps it.

    Args:
        host: whose policy is wrapped, and whose critic is whole; all processes call it together.
        make: the optimizer of the parameters that this process is to step.
        rate: the learning rate of the coming step.
    """
    gradient = GradientBuffer(host.critic.parameters())
    return gradient, CriticOptimizer(make(gradient.parameters), gradient, rate)


@contextmanager
def gathered(host: Host) -> Iterator[None]:
    """Within, one process can save the critic, of which each may hold pieces; all enter together."""
    yield
