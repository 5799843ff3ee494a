"""A critic in FSDP2's pieces: how much of it a process holds, how it is saved and loaded, how it fails."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit.fsdp_run import STEPS, TIMEOUT
from tests.kit.launch import two_processes
from tests.kit.scripted import norm
from tests.trainer.sharding.test_engines import needs_fsdp2_on_cpu

pytestmark = [pytest.mark.slow, needs_fsdp2_on_cpu]


def run(folder: Path, *jobs: str, count: int = 2) -> list[dict[str, Any]]:
    """What each process says of its jobs."""
    codes, said = two_processes(["tests.kit.fsdp_run", str(folder), *jobs], 600, count=count)
    assert codes == [0] * count, said
    return [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(count)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By name: two processes throughout; one that goes on from there; two that go on from that."""
    folder = tmp_path_factory.mktemp("fsdp")
    two = run(folder, "held", "long DDP", "long FSDP2")
    (one,) = run(folder, "held", "resumed one FSDP2/checkpoint-2", count=1)
    again = run(folder, "resumed again one/checkpoint-4")
    return {
        "held": (one["held"], [rank["held"] for rank in two]),
        "DDP": two[0]["long DDP"],
        "two": [rank["long FSDP2"] for rank in two],
        "one": one["resumed one FSDP2/checkpoint-2"],
        "again": [rank["resumed again one/checkpoint-4"] for rank in again],
    }


def check_steps(after: list[Any], expected: list[Any]) -> None:
    """The last steps of a run are those of the other."""
    start = expected[0]
    for got, wanted in zip(after[::-1], expected[::-1], strict=False):
        for part in ("policy/", "critic/"):
            names = [name for name in wanted if name.startswith(part)]
            moved = norm([wanted[n] - start[n] for n in names])
            assert norm([got[n] - wanted[n] for n in names]) <= 1e-5 * moved + 1e-12


def test_a_critic_of_another_family_takes_the_steps_of_ddp(runs):
    for rank in runs["two"]:
        assert len(rank["after"]) == STEPS + 1
        check_steps(rank["after"], runs["DDP"]["after"])


def test_its_layers_are_units(runs):
    units = runs["two"][0]["units"]
    assert units.count("FSDPLlamaDecoderLayer") == 2
    assert {"FSDPLlamaForSequenceClassification", "FSDPLinear"} < set(units)
    assert runs["two"][0]["policy's layers"] == ["Qwen2DecoderLayer"]


def test_a_process_holds_its_share_of_the_critic(runs):
    one, two = runs["held"]
    assert one["moments"] == 2 * one["weights"] == 2 * one["gradient"]
    for part in ("weights", "gradient", "moments"):
        assert sum(rank[part] for rank in two) == one[part]
        assert all(0.45 * one[part] < rank[part] < 0.55 * one[part] for rank in two)
    assert all(rank["all"] < 0.505 * one["all"] for rank in two), "whole copies are left"


def test_other_numbers_of_processes_go_on(runs):
    """From two to one, from one to two, where a rollout batch begins."""
    wanted = runs["two"][0]["after"]
    assert len(runs["one"]["after"]) == STEPS - 2 + 1
    assert all(len(rank["after"]) == STEPS - 4 + 1 for rank in runs["again"])
    for run in (runs["one"], *runs["again"]):
        check_steps(run["after"][1:], wanted)


def test_the_whole_critic_is_saved(runs):
    for rank in (runs["one"], *runs["two"], *runs["again"]):
        assert rank["saved"].keys() == rank["critic"].keys()
        assert all(torch.equal(rank["saved"][n], rank["critic"][n]) for n in rank["critic"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Of a critic of its own, and of a shared one."""
    return run(tmp_path_factory.mktemp("saved"), "best", "shared", "poisoned")


@pytest.mark.parametrize("job", ["best", "best of it"])
def test_the_best_critic_is_loaded_into_pieces(job, saved):
    for rank in saved:
        result = rank[job]
        assert result["step"] < 3, "the case should be interesting"
        assert not all(torch.equal(a, b) for a, b in zip(result["end"], result["then"], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(result["last"], result["then"], strict=True))


def test_a_shared_critic_is_saved_beside_the_policy_and_pushed_nowhere(saved):
    for rank in saved:
        result = rank["shared"]
        assert result["pushed"], "the policy is"
        assert not [n for n in result["pushed"] if "critic" in n or "head" in n.replace("lm_head", "")]
        assert not [n for n in result["policy"] if "critic" in n or "head" in n]
        trained = {n.replace(".critic.", "."): t for n, t in result["trained"].items()}
        assert result["adapter"].keys() == trained.keys()
        assert all(torch.equal(result["adapter"][n], trained[n]) for n in trained)
        assert {*result["head"]} == {"weight", "bias"}
        for name, value in result["trained head"].items():
            assert torch.equal(result["head"][name], value)
            assert value.abs().max() > 0


def test_a_gradient_that_is_not_finite_moves_neither(saved):
    for rank in saved:
        after = rank["poisoned"]
        names = [name for name in after[0] if name.startswith("critic/")]
        assert all(torch.equal(after[2][name], after[1][name]) for name in after[0])
        assert norm([after[3][name] - after[2][name] for name in names]) > 0


def test_processes_make_as_many_passes_of_the_critic_whatever_their_episodes(tmp_path):
    """Or they would wait for each other for ever."""
    one, two = run(tmp_path, "uneven")
    assert one["uneven"] != two["uneven"], "the case should be interesting"


@pytest.mark.parametrize(
    ("how", "message"),
    [("skips", "distributed collective mismatch"), ("waits", "Timed out waiting")],
)
def test_a_process_that_misses_the_critics_pass_ends_the_run(how, message, tmp_path):
    """Rather than hang: a mismatch is noticed, a process that is stuck waited for `ddp_timeout` seconds."""
    began = time.monotonic()
    codes, said = two_processes(["tests.kit.fsdp_run", str(tmp_path), f"stuck {how}"], 9 * TIMEOUT)
    assert time.monotonic() - began < 8 * TIMEOUT, "it hung"
    assert codes[0] not in (0, -9), said
    assert message in said
