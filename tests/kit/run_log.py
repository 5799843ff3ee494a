"""What of a run's log has to be the same whenever the run is: everything but times and memory.

The gap between sampler and trainer is left out too: it is rounding error of the sampler, and which
episodes share one of its batches depends on when their environments answer.
"""

from typing import Any

MEASURED = (
    *("perf/", "step_time", "train_runtime", "eval_runtime", "_per_second"),
    "sampling/sampling_logp_difference",
)


def comparable(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of a trainer state's log without what timing decides."""
    return [
        {name: value for name, value in entry.items() if not any(m in name for m in MEASURED)}
        for entry in history
    ]
