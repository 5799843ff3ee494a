"""Starts a worker on several processes of this machine, one thread each."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(script: str, job: dict[str, Any], processes: int) -> str:
    """Run a worker of this folder with `job` as JSON; returns its standard output.

    Raises:
        SystemExit: it failed; with the end of what it wrote.
    """
    torchrun: list[str] = []
    if processes > 1:
        torchrun = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
        torchrun.append(f"--master_port={free_port()}")
    result = subprocess.run(
        [sys.executable, *torchrun, str(HERE / script), json.dumps(job)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise SystemExit(f"{script} failed on {processes} processes:\n{result.stderr[-3000:]}")
    return result.stdout
