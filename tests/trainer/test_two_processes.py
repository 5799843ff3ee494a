"""Two processes with half of the batch each take the steps of one process with all of it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed_run import CASES, run
from tests.scripted import norm

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of both ranks."""
    folder = tmp_path_factory.mktemp("two")
    launch = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    result = subprocess.run(
        [sys.executable, *launch, "-m", "tests.distributed_run", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_take_the_steps_of_one(case, ranks, tmp_path):
    one, two = run(case, tmp_path), ranks[0][case]
    assert max(one["figures"]["clip_bias/norm"]) > 1e-3, "the case should be interesting"
    assert min(one["figures"]["clip_bias/scale"]) < 0.9
    for name, values in one["figures"].items():
        assert len(values) > 0, name
        assert two["figures"][name] == pytest.approx(values, rel=1e-6, abs=1e-7), name
    for step, weights in enumerate(one["after"]):
        other = two["after"][step]
        assert other.keys() == weights.keys()
        gap = norm({n: other[n] - weights[n] for n in weights})
        moved = norm({n: weights[n] - one["before"][n] for n in weights})
        assert gap < 1e-6 * moved, f"step {step}"


@pytest.mark.parametrize("case", CASES)
def test_both_processes_hold_the_same_weights(case, ranks):
    first, second = (rank[case]["after"][-1] for rank in ranks)
    assert all(torch.equal(first[name], second[name]) for name in first)
