"""Small statistics for evaluation."""

from __future__ import annotations

import math


def wilson_interval(
    successes: int, trials: int, z: float = 1.959963984540054
) -> tuple[float, float]:
    """Wilson score interval of a proportion.

    Args:
        successes: number of successes, 0 <= successes <= trials.
        trials: number of trials, >= 1.
        z: normal quantile; the default gives 95 %.

    Returns:
        Lower and upper bound, both in [0, 1].

    Raises:
        ValueError: counts out of range.

    Source: Wilson 1927, J. Am. Stat. Assoc. 22, 209-212.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(
            f"`successes={successes}` of `trials={trials}`: need 0 <= successes <= trials >= 1."
        )
    rate, square = successes / trials, z * z / trials
    center = (rate + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(rate * (1 - rate) / trials + square / (4 * trials))
    return max(0.0, center - half), min(1.0, center + half)
