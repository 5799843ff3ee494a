"""Starts a module on two processes, as torchrun does, and reads what they save."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def launcher(processes: int) -> list[str]:
    """Arguments of Python that make it start so many processes of the module that follows."""
    # It listens on a port of its own choice: one that was looked for could be taken meanwhile.
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]


def on_two_processes(
    module: str,
    folder: Path,
    *arguments: str,
    timeout: float = 900,
    weights_only: bool = True,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """Run `module folder arguments`; returns what each rank has saved as `folder/rank<r>.pt`."""
    result = subprocess.run(
        [sys.executable, *launcher(2), "-m", module, str(folder), *arguments],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-8000:]
    return [torch.load(folder / f"rank{r}.pt", weights_only=weights_only) for r in (0, 1)]
