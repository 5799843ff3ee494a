"""Two processes come to the same end where one alone fails, and learn where one alone can."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.guard_kit import same
from tests.launch import by_case
from tests.outages_run import CASES
from tests.tiers import quick

NOTHING = "rank 1 has nothing to learn from"
NOW = ("all of rank 1 fail at once", "all of rank 1 fail, too many", NOTHING)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of both ranks, of a case."""
    return by_case("tests.outages_run", CASES, NOW, tmp_path_factory, timeout=300)


ENDS = {
    "all of rank 1 fail at once": (4, "EnvironmentFailureError: The last 8 episodes all"),
    # Half of the episodes of all processes.
    "all of rank 1 fail, too many": (8, "EnvironmentFailureError: 40 of 80 episodes"),
    "weights of rank 1": (4, "NonFiniteError: Weights are not finite after step 4"),
}


@pytest.mark.parametrize("case", quick(ENDS, *NOW[:2]))
def test_both_end_with_the_same_message(case, ranks):
    step, message = ENDS[case]
    for rank in ranks(case):
        assert rank["error"].startswith(message)
        assert rank["steps"] == step
        kept = [] if case.startswith("weights") else [f"checkpoint-{step}"]
        assert rank["checkpoints"] == kept


@pytest.mark.slow
def test_failures_are_counted_over_all_processes(ranks):
    for result in ranks("all of rank 1 fail, allowed"):
        assert (result["error"], result["steps"], result["empty"]) == (None, 12, [0] * 12)


@pytest.mark.parametrize(
    ("case", "moves"),
    quick([(NOTHING, True), ("nobody has anything to learn from", False)], (NOTHING, True)),
)
def test_a_step_is_taken_where_anybody_has_something_to_learn_from(case, moves, ranks):
    for result in ranks(case):
        moved = [not same(*pair) for pair in pairwise(result["after"])]
        assert moved == [True, moves, moves]
        assert result["empty"] == ([0, 0, 0, 0] if moves else [0, 0, 1, 2])
