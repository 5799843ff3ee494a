"""Clock and memory gauge of one subject of `update.py`; needs torch alone, so every environment has it.

Memory on the CPU is the peak of the resident set (VmHWM), which Linux lets a process reset, so that
the update's peak and the peak of what comes before it are told apart. On CUDA it is the allocator's.

With one thread on the CPU, time is the process's own, which does not count what other programs make it
wait; the wall's time stands beside it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

MARK = "@@"  # a line of a worker's output that is meant for the parent


def send(message: dict[str, Any]) -> None:
    """One line to the parent."""
    print(MARK + json.dumps(message), flush=True)


def _status(field: str) -> float:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024.0
    raise RuntimeError(f"/proc/self/status has no {field}")


class Gauge:
    """Peak memory above what the imports took, in MB, since the last `reset`."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._baseline = 0.0 if self._cuda else self._trimmed()
        self.reset()

    def _trimmed(self) -> float:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return _status("VmRSS")

    def reset(self) -> None:
        """Start a new peak from what is in use now; freed memory goes back to the system first."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        self._trimmed()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    def peak(self) -> float:
        """MB."""
        peak = torch.cuda.max_memory_allocated() if self._cuda else _status("VmHWM")
        return (peak - self._baseline) / 1e6


class Probe:
    """Measures updates: from the first training forward to after the optimizer's step.

    Make it after the imports and before the models. `begin` is to be called before every training
    forward (only the first one of an update counts); the end is noticed by itself.

    Args:
        job: `device` is "cpu" or "cuda"; `threads`.
        after: called after each update with its number.
    """

    def __init__(self, job: dict[str, Any], after: Callable[[int], None] = lambda _: None) -> None:
        self.updates: list[dict[str, float]] = []
        self.phases: dict[str, float] = defaultdict(float)
        self.timing_phases = False
        self._cuda, self._after = job["device"] == "cuda", after
        self._own_time = not self._cuda and job["threads"] == 1
        self._gauge = Gauge(job["device"])
        self._started: float | None = None
        self._wall = self._before = 0.0
        self._stack: list[float] = []
        register_optimizer_step_post_hook(lambda *_: self._end())

    def clock(self) -> float:
        """Seconds, with the device's queue empty."""
        if self._cuda:
            torch.cuda.synchronize()
        return time.process_time() if self._own_time else time.perf_counter()

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


def read_job() -> dict[str, Any]:
    """Read the parent's job, and set its number of threads."""
    job: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    return job


def read_episodes(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The batch: `prompt_ids`, `completion_ids`, `turn_spans` of each episode."""
    with open(job["episodes"]) as file:
        episodes: list[dict[str, Any]] = json.load(file)
    return episodes


def trainable(*parameter_lists: Any) -> int:
    """Count the trained numbers, each once."""
    unique = {id(p): p.numel() for ps in parameter_lists for p in ps if p.requires_grad}
    return sum(unique.values())
