"""Starts the workers of `update.py`, each a process of its own, and reads what they send."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _update_batch import Episode, clip_cases, clipped_share
from _update_probe import MARK

SCRIPT = Path(__file__).parent / "_update_ours.py"


class WorkerError(Exception):
    """A worker ended without a result; carries the end of what it wrote."""


class Worker:
    """A subject at work.

    Args:
        job: what to do; `kind` is "ours" or "grpo".
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `close`)
        threads = str(job["threads"])
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        )

    def tell(self, line: str) -> None:
        """Start a paced worker's next update."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `wait_for` says why

    def wait_for(self, key: str) -> dict[str, Any]:
        """The next message of this kind.

        Raises:
            WorkerError: the worker has ended without it.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK) and key in (message := json.loads(line[len(MARK) :])):
                result: dict[str, Any] = message[key]
                return result
        self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        raise WorkerError(" | ".join(lines[-2:]) or f"exit code {self._process.returncode}")

    def close(self) -> None:
        """End the process if it still runs."""
        if self._process.poll() is None:
            self._process.terminate()
        self._process.communicate()
        self._errors.close()


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One subject from start to end; a failure becomes an `error` among the figures."""
    worker = Worker(job)
    try:
        return worker.wait_for("done")
    except WorkerError as error:
        return {"error": str(error)}
    finally:
        worker.close()


def summarise(done: dict[str, Any], tokens: int, warmup: int) -> dict[str, Any]:
    """Median times and largest peaks of a subject's updates."""
    if "error" in done:
        return done
    updates = done.pop("updates")[warmup:]
    seconds = statistics.median(u["seconds"] for u in updates)
    return {
        "seconds": seconds,
        "wall_seconds": statistics.median(u["wall_seconds"] for u in updates),
        "tokens_per_second": tokens / seconds,
        "update_mb": max(u["update_mb"] for u in updates),
        "whole_mb": max(u["whole_mb"] for u in updates),
        **done,
    }


def clip_pairs(job: dict[str, Any], episodes: list[Episode], repeats: int) -> dict[str, Any]:
    """`st-ppo` and `ppo` in turn, on batches in which the same tokens are clipped.

    Both stay loaded and take turns, one update each, so that what slows the machine slows both.
    """
    cases = clip_cases(episodes)
    order = ["none", *list(cases) * repeats]  # the first one warms up
    job = {**job, "kind": "ours", "paced": True, "updates": len(order), "cases": cases}
    variants = ("ppo", "st-ppo")
    workers = {v: Worker({**job, "variant": v}) for v in variants}
    try:
        seconds: dict[str, list[float]] = {v: [] for v in variants}
        for case in order:
            for variant, worker in workers.items():
                worker.tell(case)
                seconds[variant].append(worker.wait_for("update")["seconds"])
        done = {v: worker.wait_for("done") for v, worker in workers.items()}
    except WorkerError as error:
        return {"error": str(error)}
    finally:
        for worker in workers.values():
            worker.close()
    result = {}
    for case, turns in cases.items():
        runs = [i for i, name in enumerate(order) if name == case and i > 0]
        base, ours = ([seconds[v][i] for i in runs] for v in variants)
        extra = [b / a - 1 for a, b in zip(base, ours, strict=True)]
        result[case] = {
            "ppo": statistics.median(base),
            "st-ppo": statistics.median(ours),
            "extra_percent": 100 * statistics.median(extra),
            "extra_percent_each": [100 * e for e in extra],
            "clipped_wanted": clipped_share(episodes, turns),
            "clipped_logged": [done[v]["clip_fractions"][runs[-1]] for v in variants],
        }
    return result
