"""Clock and memory gauges of a process that trains.

Memory on the CPU is the peak of the resident set (VmHWM), which Linux lets a process reset, so that
the update's peak and the peak of what comes before it are told apart. On CUDA it is the allocator's.

On the CPU, which one thread uses, time is the process's own, which does not count what other programs make
it wait; the wall's time stands beside it.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def status(field: str) -> int:
    """Return a number that the kernel has of this process. Sizes are in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def trim() -> None:
    """Give freed memory back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class Gauge:
    """Peak memory above what the imports took, in MB, since the last `reset`."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        trim()
        self._baseline = 0 if self._cuda else 1024 * status("VmRSS")
        self.reset()

    def reset(self) -> None:
        """Start a new peak from what is in use now; freed memory goes back to the system first."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        trim()
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> float:
        """MB."""
        peak = torch.cuda.max_memory_allocated() if self._cuda else 1024 * status("VmHWM")
        return (peak - self._baseline) / 1e6


class Probe:
    """Measures updates: from the first training forward to after the optimizer's step.

    Make it after the imports and before the models. `begin` is to be called before every training
    forward (only the first one of an update counts); the end is noticed by itself.

    Args:
        device: "cpu" or "cuda".
        after: called after each update with its number.
    """

    def __init__(self, device: str, after: Callable[[int], None]) -> None:
        self.updates: list[dict[str, float]] = []
        self.phases: dict[str, float] = defaultdict(float)
        self.timing_phases = False
        self._cuda, self._after = device == "cuda", after
        self._gauge = Gauge(device)
        self._started: float | None = None
        self._wall = self._before = 0.0
        self._stack: list[float] = []
        register_optimizer_step_post_hook(lambda *_: self._end())

    def clock(self) -> float:
        """Seconds, with the device's queue empty."""
        if not self._cuda:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def begin(self) -> None:
        """A training forward is about to run."""
        if self._started is None:
            self._before = self._gauge.peak()
            self._gauge.reset()
            self.phases.clear()
            self._started, self._wall = self.clock(), time.perf_counter()

    def _end(self) -> None:
        if self._started is None:
            return
        seconds, wall = self.clock() - self._started, time.perf_counter() - self._wall
        peak = self._gauge.peak()
        self.updates.append(
            {
                "seconds": seconds,
                "wall_seconds": wall,
                "update_mb": peak,
                "whole_mb": max(peak, self._before),
            }
        )
        self._started = None
        self._after(len(self.updates) - 1)

    def phase(self, owner: Any, method: str, name: str) -> None:
        """Time a method's calls as a phase, without the phases that it calls itself."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.timing_phases:
                return original(*args, **kwargs)
            self._stack.append(0.0)
            started = self.clock()
            try:
                return original(*args, **kwargs)
            finally:
                took, inner = self.clock() - started, self._stack.pop()
                self.phases[name] += took - inner
                if self._stack:
                    self._stack[-1] += took

        setattr(owner, method, timed)
