"""The study's Monte Carlo advantages: what a state is worth, from other episodes of its row."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="module")
def credit(script):
    return script("_rivals_credit")


def test_two_rooms_by_hand(credit):
    """One row, three episodes: right right, right wrong, wrong right."""
    doors = torch.tensor([[[1, 1], [1, 0], [0, 1]]]).bool()
    worth, advantages = credit.monte_carlo(doors)
    # The others of episode 0: one of two passes room 0, none of one passes room 1, and so on.
    assert worth[0].tolist() == [[0.0, 0.0], [0.5, 1.0], [0.5, 0.0]]
    assert advantages[0].tolist() == [[0.0, 1.0], [0.5, -1.0], [-0.5, 0.0]]


def test_many_episodes_find_the_chances_that_made_them(credit):
    dice = torch.Generator().manual_seed(0)
    chances = torch.tensor([[0.9, 0.5, 0.8], [0.6, 0.7, 0.95]], dtype=torch.float64)
    doors = torch.rand(2, 20_000, 3, generator=dice, dtype=torch.float64) < chances.unsqueeze(1)
    worth, advantages = credit.monte_carlo(doors)
    for row, p in enumerate(chances.tolist()):
        whole = [p[0] * p[1] * p[2], p[1] * p[2], p[2], 1.0]
        for right, value, advantage in zip(
            doors[row, :200], worth[row], advantages[row], strict=False
        ):
            so_far = 1.0
            for room in range(3):
                before = so_far * whole[room]
                so_far *= float(right[room])
                assert value[room] == pytest.approx(before, abs=0.02)
                assert advantage[room] == pytest.approx(so_far * whole[room + 1] - before, abs=0.02)


def test_a_room_that_nobody_else_of_the_row_has_reached_has_the_chance_of_all_rows(credit):
    doors = torch.tensor([[[1, 1], [0, 1]], [[1, 1], [1, 0]]]).bool()
    worth, _ = credit.monte_carlo(doors)
    assert worth[0, 0, 1] == pytest.approx(2 / 3)


def test_doors_are_judged_as_the_environment_does(credit, script):
    tasks = script("_stability_tasks")
    (row,) = tasks.corridor_rows(1, 5)
    actions = [m["content"] for m in tasks.demonstration(row, 0.0) if m["role"] == "assistant"]
    actions[2] = "i seek nothing left"
    assert credit.right_doors(row, actions) == [i != 2 for i in range(tasks.ROOMS)]


def test_correlation(credit):
    assert credit.correlation(
        torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 6.0])
    ) == pytest.approx(1)
    assert credit.correlation(
        torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, 1.0])
    ) == pytest.approx(0)
    assert credit.correlation(torch.ones(3), torch.tensor([1.0, 0.0, 1.0])) == 0.0
