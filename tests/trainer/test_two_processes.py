"""Two processes with half of the batch each take the steps of one process with all of it."""

import pytest
import torch

from tests.kit.distributed_run import CASES, run
from tests.kit.launch import by_case
from tests.kit.scripted import norm
from tests.kit.tiers import quick

NOW = (
    *("LoRA, shared critic", "estimated", "groups of several lengths", "RLOO", "ReBN"),
    "a process without a winner",
    "contexts",
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of both ranks, of a case."""
    return by_case("tests.kit.distributed_run", CASES, NOW, tmp_path_factory)


@pytest.mark.long
@pytest.mark.parametrize("case", quick(CASES, *NOW))
def test_two_processes_take_the_steps_of_one(case, ranks, tmp_path):
    one, two = run(case, tmp_path), ranks(case)[0]
    assert max(one["figures"]["clip_bias/norm_estimate"]) > 1e-3, "the case should be interesting"
    assert min(one["figures"]["clip_bias/scale"]) < 0.9
    assert len(set(one["figures"].get("step/factor", [0, 1]))) > 1
    for name, values in one["figures"].items():
        assert len(values) > 0, name
        assert two["figures"][name] == pytest.approx(values, rel=1e-6, abs=1e-7), name
    for step, weights in enumerate(one["after"]):
        other = two["after"][step]
        assert other.keys() == weights.keys()
        gap = norm({n: other[n] - weights[n] for n in weights})
        moved = norm({n: weights[n] - one["before"][n] for n in weights})
        assert gap < 1e-6 * moved, f"step {step}"


@pytest.mark.long
@pytest.mark.parametrize("case", quick(CASES, *NOW))
def test_both_processes_hold_the_same_weights(case, ranks):
    first, second = (rank["after"][-1] for rank in ranks(case))
    assert all(torch.equal(first[name], second[name]) for name in first)
