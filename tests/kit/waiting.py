"""How tests wait: for what they wait for, so that a busy machine makes them slower and nothing else."""

import time
from collections.abc import Callable

# Seconds that only something that hangs takes.
PATIENCE = 120.0


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> bool:
    """Whether the condition has come true in time."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return bool(condition())
