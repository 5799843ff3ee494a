"""Starts scripts of this folder in processes of their own, and reads the figures that they send."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

# Begins a line of a worker's output that is meant for the parent.
MARK = "@@"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def send(figures: dict[str, Any]) -> None:
    """Send one message to the parent."""
    print(f"\n{MARK}{json.dumps(figures)}", flush=True)


class WorkerError(Exception):
    """A worker ended without a message; carries the end of what it wrote."""


class Worker:
    """A script at work.

    Args:
        script: a file of this folder.
        *words: its command line.
        processes: with more than one, torchrun starts them.
        **environment: variables on top of those of this process.
    """

    def __init__(self, script: str, *words: Any, processes: int = 1, **environment: str) -> None:
        torchrun: list[str] = []
        if processes > 1:
            # It listens on a port of its own choice: one that was looked for could be taken meanwhile.
            count = f"--nproc_per_node={processes}"
            torchrun = ["-m", "torch.distributed.run", "--standalone", count]
        path = str(Path(__file__).with_name(script))
        # `close` closes it.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *torchrun, path, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **environment},
        )

    def tell(self, line: str) -> None:
        """Write a line to the worker's standard input."""
        assert self.process.stdin is not None
        # `hear` says why a worker has ended.
        with suppress(BrokenPipeError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Return the worker's next message.

        Raises:
            WorkerError: the worker has ended without it.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return dict(json.loads(line.removeprefix(MARK)))
        self.process.wait()
        self._errors.seek(0)
        written = self._errors.read()
        if "OutOfMemoryError" in written:
            raise WorkerError("out of memory")
        lines = [line.strip() for line in written.splitlines() if line.strip()]
        raise WorkerError(" | ".join(lines[-2:]) or f"exit code {self.process.returncode}")

    def close(self) -> None:
        """End the process if it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
        self.process.communicate()
        self._errors.close()


def launch(script: str, *words: Any, seconds: float = 1e6, **options: Any) -> dict[str, Any]:
    """Return the one message of a worker. A failure becomes an `error` among the figures.

    Args:
        script: a file of this folder.
        *words: its command line.
        seconds: the worker is ended after them.
        **options: as for `Worker`.
    """
    worker = Worker(script, *words, **options)
    timer = Timer(seconds, worker.process.terminate)
    timer.start()
    try:
        return worker.hear()
    except WorkerError as error:
        return {"error": str(error) if timer.is_alive() else f"not done after {seconds:g} seconds"}
    finally:
        timer.cancel()
        worker.close()
