"""A critic in a DeepSpeed engine of its own: how much of it a process holds, how it is saved and loaded."""

from typing import Any

import pytest
import torch

from tests.kit.launch import on_two_processes
from tests.trainer.sharding.test_engines import DEEPSPEED, needs_deepspeed, ninja

pytestmark = [pytest.mark.slow, needs_deepspeed, pytest.mark.parametrize("engine", DEEPSPEED)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What both processes say of all jobs, by engine and job."""
    folder = tmp_path_factory.mktemp("zero")
    return on_two_processes("tests.kit.zero_run", folder, *DEEPSPEED, environment=ninja())


def test_a_process_holds_its_share_of_the_critic(engine, ranks):
    shared_out = {"ZeRO-1": ("moments",), "ZeRO-2": ("moments", "gradient")}
    for rank in ranks:
        held: dict[str, Any] = rank[f"{engine} held"]
        whole = {"weights": 4 * held["elements"], "gradient": 4 * held["elements"]}
        whole["moments"] = 2 * whole["weights"]
        for part in shared_out.get(engine, tuple(whole)):
            assert 0.45 * whole[part] < held[part] < 0.55 * whole[part], part


@pytest.mark.parametrize("job", ["best", "best lora"])
def test_the_best_critic_is_loaded_and_saved_whole(engine, job, ranks):
    for rank in ranks:
        result = rank[f"{engine} {job}"]
        assert result["step"] == 1
        pairs = list(zip(result["last"], result["then"], strict=True))
        assert all(torch.equal(last, then) for last, then in pairs)
        assert not all(
            torch.equal(end, then) for end, then in zip(result["end"], result["then"], strict=True)
        )
        if job == "best":
            saved = [result["saved"][name] for name in result["names"]]
        else:
            names = [n.replace(".default", "") for n in result["names"]]
            names = [n.replace("modules_to_save.", "") for n in names]
            saved = [result["saved"][name] for name in names]
        assert all(torch.equal(a, b) for a, b in zip(saved, result["last"], strict=True))


def test_values_are_not_rounded_to_bfloat16(engine, ranks):
    for rank in ranks:
        values = rank[f"{engine} rounded"]["values"]
        assert values.dtype == torch.float32
        seen = values[values != 0]
        assert len(seen) > 20
        assert (seen == seen.bfloat16().float()).float().mean() < 0.2


def test_a_checkpoint_lists_the_engines_files(engine, ranks):
    for rank in ranks:
        result = rank[f"{engine} outside"]
        assert result["listed"] == result["there"]
        assert len([name for name in result["listed"] if name.endswith("optim_states.pt")]) == 2


def test_a_checkpoint_without_an_engine_is_refused(engine, ranks):
    for rank in ranks:
        error = rank[f"{engine} outside"]["error"]
        assert "has no 'critic_engine'" in error
