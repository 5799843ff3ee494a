"""Sums that become metrics: added over micro-batches and processes, divided once at the end."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.masking import widest

Reduce = Callable[[Tensor], Tensor]
# A variance below this share of the mean square is noise: a few float32 rounding errors can cause it.
NOISE = (8 * torch.finfo(torch.float32).eps) ** 2
# Deviations from the mean below this many rounding errors of the largest value are noise.
ROUNDING = 4


def wide(tensor: Tensor) -> Tensor:
    """Return the tensor, detached, in double precision if the device has it."""
    return widest(tensor.detach())


def centred(values: Tensor, dim: int | None = None) -> Tensor:
    """Return the deviations of values from their mean over `dim`, in the same shape. NaN values stay NaN.

    A deviation that can be a rounding error between equal values is exactly 0.
    """
    known = wide(values)
    around = known - known.nanmean(dim, keepdim=True)
    size = known.abs().nan_to_num(posinf=torch.inf).amax(() if dim is None else dim, keepdim=True)
    noise = ROUNDING * torch.finfo(values.dtype).eps * size
    return around.masked_fill(around.abs() < noise, 0.0)


def spread(values: Tensor, dim: int | None = None) -> Tensor:
    """Return the unbiased standard deviation over `dim`, NaN values excluded; fewer than two values give NaN.

    Values that are equal up to rounding give exactly 0.
    """
    count = (~values.isnan()).sum(dim)
    variance = centred(values, dim).square().nansum(dim) / (count - 1)
    return variance.masked_fill(count < 2, torch.nan).sqrt()


def deviation(values: Tensor, mask: Tensor, reduce: Reduce) -> float:
    """Return the standard deviation of the `values` under `mask`, a bool tensor of the same shape.

    `reduce` sums over processes. Values that are equal up to rounding give exactly 0.
    """
    known = wide(values).masked_fill(~mask, 0.0)
    total, squares, count = reduce(
        torch.stack([known.sum(), known.square().sum(), mask.sum().to(known.dtype)])
    ).tolist()
    mean, square = total / max(count, 1.0), squares / max(count, 1.0)
    variance = square - mean**2
    return variance**0.5 if variance > NOISE * square else 0.0


class RatioOfSums:
    """Collects numerators and denominators by name, plus maxima.

    The quotient of a denominator of 0 is 0.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[Tensor]] = {}
        self._maxima: dict[str, list[Tensor]] = {}

    def add(self, name: str, numerator: Tensor, denominator: Tensor) -> None:
        """Add a numerator and a denominator, 0-dim each, to the quotient `name`."""
        pair = torch.stack([wide(numerator), wide(denominator)])
        self._sums.setdefault(name, []).append(pair)

    def mean(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add the `values` under `mask`, a bool tensor of the same shape, to the mean `name`."""
        self.add(name, values.detach().masked_fill(~mask, 0).sum(), mask.sum())

    def maximum(self, name: str, value: Tensor) -> None:
        """Update the maximum `name` by `value`, 0-dim."""
        self._maxima.setdefault(name, []).append(wide(value))

    def flush(self, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return the metrics over all processes, and reset all sums.

        Every process must have added the same names in the same order. `gather` stacks the [1, N]
        tensors of all processes into [W, N].
        """
        if not self._sums and not self._maxima:
            return {}
        pairs = [torch.stack(parts).sum(0) for parts in self._sums.values()]
        single = [torch.stack(parts).amax().view(1) for parts in self._maxima.values()]
        everyone = gather(torch.cat([*pairs, *single]).unsqueeze(0))
        parts = everyone.split([2 * len(pairs), len(self._maxima)], dim=1)
        sums = parts[0].sum(0).view(-1, 2).tolist()
        maxima = parts[1].amax(0).tolist() if self._maxima else []
        result = {
            name: top / bottom if bottom else 0.0
            for name, (top, bottom) in zip(self._sums, sums, strict=True)
        }
        result.update(zip(self._maxima, maxima, strict=True))
        self._sums, self._maxima = {}, {}
        return result
