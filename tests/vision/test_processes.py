"""Two processes train on images as one does."""

import pytest

from tests.kit.launch import on_two_processes
from tests.kit.vision_processes_run import CASES, run


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_two_processes_move_the_weights_as_one(case, tmp_path):
    ranks = on_two_processes("tests.kit.vision_processes_run", tmp_path, case)
    # `generate` draws from each process's own state, so the processes can only equal each other.
    sampled = case == "padded, through generate"
    one = ranks[0][case] if sampled else run(case, tmp_path / "one")
    largest = max(float(move.abs().max()) for name, move in one["moved"].items() if name != "critic")
    towers = [name for name in one["moved"] if "vis" in name]
    seen = max(float(one["moved"][name].abs().max()) for name in towers)
    assert seen > 0
    for rank in ranks:
        found = rank[case]
        assert found["figures"] == pytest.approx(one["figures"], rel=1e-4)
        for name, move in one["moved"].items():
            if name != "critic":
                assert float((found["moved"][name] - move).abs().max()) < 1e-4 * largest, name
        # What reads images moves less than the rest.
        for name in towers:
            assert float((found["moved"][name] - one["moved"][name]).abs().max()) < 1e-3 * seen, name
        for own, move in zip(found["moved"]["critic"], one["moved"]["critic"], strict=True):
            assert float((own - move).abs().max()) < 1e-4 * float(move.abs().max()) + 1e-9
