"""Sums that become metrics: added over micro-batches and processes, divided once at the end.

A mean of micro-batch means depends on how the batch was cut; a quotient of sums does not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...core.masking import widest


def wide(tensor: Tensor) -> Tensor:
    """Detached, in double precision where the device has it."""
    return widest(tensor.detach())


class RatioOfSums:
    """Collects numerators and denominators by name, plus maxima.

    Args:
        optional: names left out where the denominator is 0; elsewhere a quotient of nothing is 0.
    """

    def __init__(self, *optional: str) -> None:
        self._optional = optional
        self._sums: dict[str, list[Tensor]] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, name: str, numerator: Tensor, denominator: Tensor) -> None:
        """Add to the quotient `name`; both are 0-dim."""
        pair = torch.stack([wide(numerator), wide(denominator)])
        if name in self._sums:
            self._sums[name].append(pair)
        else:
            self._sums[name] = [pair]

    def maximum(self, name: str, value: Tensor) -> None:
        """Raise the maximum `name`; `value` is 0-dim."""
        value = wide(value)
        known = self._maxima.get(name)
        self._maxima[name] = value if known is None else torch.maximum(known, value)

    def flush(self, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Divide, over all processes, and start afresh.

        Args:
            gather: stacks a [1, N] tensor of every process into [W, N].

        Every process must have added the same names in the same order.
        """
        if not self._sums and not self._maxima:
            return {}
        pairs = [torch.stack(self._sums[name]).sum(0) for name in self._sums]
        flat = torch.cat([*pairs, *(m.reshape(1) for m in self._maxima.values())])
        everyone = gather(flat.unsqueeze(0))
        sums = everyone[:, : 2 * len(pairs)].sum(0).view(-1, 2).tolist()
        maxima = everyone[:, 2 * len(pairs) :].amax(0).tolist() if self._maxima else []
        result = {
            name: top / bottom if bottom else 0.0
            for name, (top, bottom) in zip(self._sums, sums, strict=True)
            if bottom or name not in self._optional
        }
        result.update(zip(self._maxima, maxima, strict=True))
        self._sums, self._maxima = {}, {}
        return result
