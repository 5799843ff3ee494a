"""Two processes evaluate to the figures of one, though they must fill up their last batch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.evaluation_run import CASES, ROWS, evaluated, figures_of
from tests.trainer.test_two_processes import ROOT, free_port


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of both ranks."""
    folder = tmp_path_factory.mktemp("two")
    launch = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    result = subprocess.run(
        [sys.executable, *launch, "-m", "tests.evaluation_run", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_report_what_one_reports(case, ranks, tmp_path):
    one, trainer = evaluated(tmp_path, case, per_device_eval_batch_size=3)
    played = [fact for rank in ranks for fact in rank[case][1]]
    assert sorted(played, key=lambda fact: fact.name) == trainer.facts
    assert len(played) == (2 * ROWS if case == "text" else ROWS)
    for rank in ranks:
        assert figures_of(rank[case][0]) == figures_of(one)


def test_both_processes_report_the_same_in_the_middle_of_a_training(ranks):
    first, second = (rank["while training"] for rank in ranks)
    assert first == second
    assert [figures["eval_episodes"] for figures in first] == [2 * ROWS] * 2
