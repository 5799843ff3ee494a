"""Two processes whose episodes have different numbers of turns: no dead-lock, nobody's tokens mixed."""

import pytest
import torch

from tests.kit.collective_run import LETTERS, TURNS, RowEnv, RowTools, trained
from tests.kit.fakes import char_tokenizer
from tests.kit.launch import on_two_processes

# Of each process by nature: what it measured on its own clock and memory.
OWN = ("step_time", "train_runtime", "perf/peak_memory_gb")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    # A dead-lock ends at the time limit.
    return on_two_processes("tests.kit.collective_run", folder, weights_only=False)


@pytest.mark.long
@pytest.mark.parametrize("case", ["text", "tools", "server", "slow"])
def test_processes_have_different_numbers_of_turns_and_agree(ranks, case):
    first, second = (rank[case] for rank in ranks)
    assert first["columns"] == [list(LETTERS[:4])]
    assert second["columns"] == [list(LETTERS[4:])]
    assert all(turns == TURNS[:4] for turns in first["turns"])
    assert all(turns == TURNS[4:] for turns in second["turns"])
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"], strict=True))
    assert len(first["logs"]) == len(second["logs"]) > 1
    for one, other in zip(first["logs"], second["logs"], strict=True):
        assert one.keys() == other.keys()
        assert {k for k in one if one[k] != other[k]} <= set(OWN)


@pytest.mark.long
@pytest.mark.parametrize(("case", "environment"), [("text", RowEnv), ("tools", RowTools)])
def test_figures_are_those_of_all_processes_together(ranks, case, environment, tmp_path):
    """One process with the whole batch plays the same episodes and logs the same."""
    alone, halves = trained(tmp_path, 1, environment), [rank[case] for rank in ranks]

    def rows(result):
        return [
            ids[mask.bool()].tolist() for ids, mask in zip(result["ids"][0], result["masks"][0], strict=True)
        ]

    assert rows(alone) == [*rows(halves[0]), *rows(halves[1])]
    one, two = alone["logs"][0], halves[0]["logs"][0]
    assert one.keys() == two.keys()
    # 0.5 for every first turn, 2.5 for every third, 4.5 for every fifth
    expected = (8 * 0.5 + 3 * 2.5 + 4.5) / 12
    assert two["rewards/even_turns/turn_mean"] == pytest.approx(expected)
    assert {k: two[k] for k in two if k.startswith("seen/")} == {f"seen/{n}": 1.0 for n in LETTERS}
    assert two["turns/mean"] == pytest.approx(sum(TURNS) / 8)
    for name in one:
        if name not in OWN and not name.startswith("entropy"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name


@pytest.mark.long
@pytest.mark.parametrize("case", ["server", "slow"])
def test_every_row_gets_its_own_completions_from_the_server(ranks, case):
    tokenizer = char_tokenizer()
    for rank, letters in zip(ranks, (LETTERS[:4], LETTERS[4:]), strict=True):
        result = rank[case]
        for b, letter in enumerate(letters):
            index, ids = result["index"][0][b], result["ids"][0][b]
            for k in range(int(index.max()) + 1):
                places = (index == k).nonzero().flatten()
                assert tokenizer.decode(ids[places]) == f"{letter * 2}<|im_end|>"
                # The log-probabilities say how long the row was: those of this turn of this row.
                length = result["prompts"][b] + int(places[0])
                assert result["logprobs"][b][places].tolist() == [-length] * 3


@pytest.mark.long
@pytest.mark.parametrize("case", ["server", "slow"])
def test_each_process_asks_for_its_own_turns_one_by_one(ranks, case):
    requests = ranks[0][case]["requests"]
    assert ranks[1][case]["requests"] is None
    assert [len(request["prompt"]) for request in requests] == [1] * sum(TURNS)
