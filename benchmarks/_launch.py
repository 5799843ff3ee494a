"""Starts a worker on several processes of this machine, one thread each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def launch(script: str, job: dict[str, Any], processes: int) -> str:
    """Run a worker of this folder with `job` as JSON; returns its standard output.

    Raises:
        SystemExit: it failed; with the end of what it wrote.
    """
    torchrun: list[str] = []
    if processes > 1:
        # It listens on a port of its own choice: one that was looked for could be taken meanwhile.
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
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
