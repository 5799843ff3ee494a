"""Checkpoints of an earlier commit, written in the middle of a rollout batch, go on as they did there.

That was another machine. Choices, counts, seeds and random numbers are equal all the same, because rounding
decides none of them: `recipe` calculates in float64. Weights and figures are close.
"""

import json

import pytest
import torch

from tests.fixtures.unfinished_runs import recipe
from tests.kit.run_log import comparable

SETTINGS = recipe.SETTINGS
# How far rounding can take a gradient, and from there a weight. An entry of a gradient is a sum over at most
# the tokens of a rollout batch, each rounded once, and no larger than the norm to which gradients are
# clipped. Adam magnifies the error most if the true gradient is 0, as that of the bias of attention's keys:
# it divides by its epsilon alone.
EPISODES = SETTINGS["per_device_train_batch_size"] * SETTINGS["gradient_accumulation_steps"]
TERMS = EPISODES * SETTINGS["max_completion_length"]
NOISE = TERMS * torch.finfo(torch.float64).eps / 2 * SETTINGS["max_grad_norm"]
STEPS, RATE = recipe.RUN_END - recipe.CHECKPOINT, recipe.CRITIC["critic_learning_rate"]
FAR = STEPS * RATE * NOISE / SETTINGS["adam_epsilon"]
# Traces keep six digits, of which the last one is rounded.
DIGITS = 1e-5
# The log may gain and lose names, but not these.
GONE = {"policy/movement"}
LOGGED = ("loss", "grad_norm", "policy/ratio_mean", "episode/score", "clip_bias/scale")


def close(value):
    """Whatever equals this but for the rounding of its floats."""
    if isinstance(value, dict):
        return {name: close(item) for name, item in value.items()}
    if isinstance(value, list):
        return [close(item) for item in value]
    return pytest.approx(value, rel=DIGITS, abs=FAR) if isinstance(value, float) else value


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return recipe.unpacked("base", tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("case", recipe.CASES)
def test_an_unfinished_run_goes_on_as_it_did(case, base, tmp_path):
    folder = recipe.unpacked(case, tmp_path)
    run, expected = folder / "run", json.loads((folder / "expected.json").read_text())
    trainer = recipe.trainer(case, base, run)
    trainer.train(resume_from_checkpoint=str(run / f"checkpoint-{recipe.CHECKPOINT}"))
    found = recipe.outcome(trainer, run)

    assert found["draws"] == expected["draws"]
    assert found["episodes"].keys() == expected["episodes"].keys()
    for key, episode in expected["episodes"].items():
        mine = found["episodes"][key]
        assert [mine[n] for n in recipe.EXACT] == [episode[n] for n in recipe.EXACT], key
        for name in recipe.CLOSE:
            assert mine[name] == close(episode[name]), (key, name)
    log, before = comparable(found["log"]), comparable(expected["log"])
    assert len(log) == len(before)
    for entry, known in zip(log, before, strict=True):
        assert all(name in entry for name in LOGGED if name in known)
        for name in known.keys() & entry.keys() - GONE:
            assert entry[name] == close(known[name]), (name, known["step"])
    mine = recipe.weights(run / f"checkpoint-{recipe.RUN_END}")
    theirs = recipe.weights(folder / "expected")
    assert mine.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(mine[name], weight, rtol=0.0, atol=FAR)
    assert found["moments"] == pytest.approx(expected["moments"], rel=DIGITS, abs=NOISE)
