"""Packs against loops over beginnings, and the cheapest division against all divisions."""

import itertools
import random

import pytest
import torch

from trl_stppo.core.packing import build_pack, plan_packs, shared_lengths

CPU = torch.device("cpu")
ROWS = [[5, 6, 7, 8], [5, 6, 9], [1, 2]]


def random_rows(seed, count=6, longest=7):
    draw = random.Random(seed)
    return [[draw.randrange(3) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def test_a_pack_by_hand():
    pack = build_pack(ROWS, [0, 1, 2], CPU)
    assert pack.rows == [2, 0, 1]
    assert pack.input_ids.tolist() == [[1, 2, 5, 6, 7, 8, 9]]
    assert pack.position_ids.tolist() == [[0, 1, 0, 1, 2, 3, 2]]
    assert [places.tolist() for places in pack.places] == [[0, 1], [2, 3, 4, 5], [2, 3, 6]]
    attended = [row.nonzero()[:, 0].tolist() for row in pack.attends[0, 0]]
    assert attended == [[0], [0, 1], [2], [2, 3], [2, 3, 4], [2, 3, 4, 5], [2, 3, 6]]


@pytest.mark.parametrize("seed", range(20))
def test_each_token_sees_its_own_beginning_alone(seed):
    rows = random_rows(seed)
    pack = build_pack(rows, range(len(rows)), CPU)
    ids, positions = pack.input_ids[0].tolist(), pack.position_ids[0].tolist()
    beginnings = {tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)}
    assert len(ids) == len(beginnings)
    for number, places in zip(pack.rows, pack.places, strict=True):
        assert [ids[place] for place in places.tolist()] == rows[number]
        for n, place in enumerate(places.tolist()):
            assert positions[place] == n
            seen = pack.attends[0, 0, place].nonzero()[:, 0].tolist()
            assert seen == sorted(places[: n + 1].tolist())


@pytest.mark.parametrize("seed", range(20))
def test_the_cheapest_division_of_neighbours_is_found(seed):
    rows = random_rows(seed, count=5)
    settings = {"max_tokens": 9, "quadratic": 0.1, "overhead": 1.5}
    order, _ = shared_lengths(rows)

    def cost(numbers):
        tokens = build_pack(rows, numbers, CPU).input_ids.size(1)
        fits = tokens <= settings["max_tokens"] or len(numbers) == 1
        return tokens + 0.1 * tokens**2 + 1.5 if fits else float("inf")

    best = float("inf")
    for cuts in itertools.product([False, True], repeat=len(rows) - 1):
        at = [0, *(n + 1 for n, cut in enumerate(cuts) if cut), len(rows)]
        best = min(best, sum(cost(order[a:b]) for a, b in itertools.pairwise(at)))
    packs, found = plan_packs(rows, **settings)
    assert found == pytest.approx(best) == pytest.approx(sum(map(cost, packs)))
    assert sorted(itertools.chain(*packs)) == list(range(len(rows)))


def test_a_row_above_the_limit_is_a_pack_of_its_own():
    assert plan_packs([[1] * 9, [2]], max_tokens=4, quadratic=0.0)[0] == [[0], [1]]
