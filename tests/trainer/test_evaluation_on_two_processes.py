"""Two processes evaluate to the figures of one, though they must fill up their last batch."""

from __future__ import annotations

import pytest

from tests.evaluation_run import CASES, ROWS, evaluated, figures_of
from tests.launch import on_two_processes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of both ranks."""
    folder = tmp_path_factory.mktemp("two")
    return on_two_processes("tests.evaluation_run", folder, weights_only=False)


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
