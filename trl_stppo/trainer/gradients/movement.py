"""How far an optimizer step moves the policy: what two methods of equal learning rate may differ in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

# Weights that are looked at; a copy of all would double a large policy's memory.
SAMPLE = 2**16


class Movement:
    """Reports the L2 norm of each step, from evenly spaced weights of every parameter.

    Exact where there are at most `SAMPLE` weights, otherwise an estimate of the same expectation.

    Args:
        optimizer: the unwrapped one.
        parameters: of the policy.
        report: takes the figure once the step is done, before it is logged.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        report: Callable[[dict[str, float]], None],
    ) -> None:
        self._parameters, self._report = list(parameters), report
        self._stride = max(1, -(-sum(p.numel() for p in parameters) // SAMPLE))
        self._before: list[Tensor] = []
        optimizer.register_step_pre_hook(self._take)
        optimizer.register_step_post_hook(self._compare)

    def _sample(self, parameter: nn.Parameter) -> Tensor:
        return parameter.detach().reshape(-1)[:: self._stride]

    def _take(self, *_: object) -> None:
        self._before = [self._sample(parameter).clone() for parameter in self._parameters]

    def _compare(self, *_: object) -> None:
        squares = [
            (self._sample(p).float() - before.float()).square().mean() * p.numel()
            for p, before in zip(self._parameters, self._before, strict=True)
            if p.numel()
        ]
        if squares:
            self._report({"policy/movement": float(torch.stack(squares).sum().sqrt())})
        self._before = []
