"""An agent that 0.1.0 has pushed loads and plays what it played, and training goes on from it.

The likeliest tokens are so by a margin that no rounding crosses; those that are drawn are compared where
the arithmetic is the same (`same_arithmetic`).
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.fixtures.v0_1_0 import recipe
from trl_stppo import Agent, STPPOConfig, STPPOTrainer
from trl_stppo.envs import SearchEnv

PLAYED = (
    *("messages", "turns", "rewards", "final_reward", "success", "stop_reason", "error", "prompt"),
    *("prompt_ids", "ids", "turn_spans"),
)


@pytest.fixture(scope="module")
def agent_folder(tmp_path_factory):
    return recipe.unpacked("agent", tmp_path_factory.mktemp("agent"))


@pytest.fixture(scope="module")
def expected(agent_folder):
    return json.loads((agent_folder / "expected.json").read_text())


@pytest.fixture(scope="module")
def agent(agent_folder):
    return Agent.from_pretrained(str(agent_folder / "repository"))


@pytest.fixture(scope="module")
def played(agent, base):
    """Through JSON, which knows no tuples."""
    return json.loads(json.dumps(recipe.played(agent, base)))


def check(played, expected):
    assert len(played) == len(expected)
    for mine, theirs in zip(played, expected, strict=True):
        assert {name: mine[name] for name in PLAYED} == {name: theirs[name] for name in PLAYED}
        assert mine["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-4)


def test_it_plays_what_it_played(played, expected):
    assert sum(episode["success"] for episode in expected["greedy"]) > 8
    check(played["greedy"], expected["greedy"])


def test_it_draws_what_it_drew(played, expected, same_arithmetic):
    if not same_arithmetic:
        pytest.skip("this machine or torch rounds otherwise: a token that is drawn may be another")
    assert any(
        e["ids"] != g["ids"] for e, g in zip(expected["drawn"], expected["greedy"], strict=True)
    )
    check(played["drawn"], expected["drawn"])
    check(played["one"], expected["one"])


def test_its_settings_and_its_environment_are_known(agent):
    settings = agent.settings
    limits = settings.max_completion_length, settings.max_turns, settings.max_turn_tokens
    assert limits == (96, 3, 16)
    assert (settings.seed, settings.sampling["temperature"]) == (11, 1.0)
    assert (settings.trainer, settings.dtype) == ("STPPOTrainer", "float32")
    assert agent.environment_class(["trl_stppo"]) is SearchEnv


def test_training_goes_on_from_it_with_its_critic(agent_folder, base, tmp_path):
    repository = agent_folder / "repository"
    onward = STPPOTrainer(
        model=str(repository),
        value_model=str(repository),
        processing_class=AutoTokenizer.from_pretrained(repository),
        args=STPPOConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to="none"),
        train_dataset=recipe.rows(),
        environment_factory=lambda: recipe.environment(base),
    )
    onward.save_model()
    for name in ("model.safetensors", "critic/model.safetensors"):
        mine, theirs = load_file(tmp_path / name), load_file(repository / name)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs), name
