"""Checkpoints of an earlier commit, written in the middle of a rollout batch, go on as they did there.

Bit for bit on a machine that calculates as the one that wrote them (`recipe.canary`). Elsewhere the weights
must be close, unless a token was drawn otherwise, which makes it another run.
"""

import json

import pytest
import torch

from tests.fixtures.unfinished_runs import recipe
from tests.kit.run_log import comparable

CLOSE = 1e-3  # of the way from the checkpoint's weights, L2 over all of them
# The log may gain and lose names, but not these.
GONE = {"policy/movement"}  # its part before the checkpoint is still logged
LOGGED = ("loss", "grad_norm", "policy/ratio_mean", "episode/score", "clip_bias/scale")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return recipe.unpacked("base", tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("case", recipe.CASES)
def test_an_unfinished_run_goes_on_as_it_did(case, base, tmp_path):
    folder, threads = recipe.unpacked(case, tmp_path), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer = recipe.trainer(case, base, folder / "run")
        trainer.train(resume_from_checkpoint=str(folder / f"run/checkpoint-{recipe.CHECKPOINT}"))
        same = recipe.canary(base) == json.loads((recipe.HERE / "made.json").read_text())["canary"]
    finally:
        torch.set_num_threads(threads)
    expected = json.loads((folder / "expected.json").read_text())
    end = folder / f"run/checkpoint-{recipe.RUN_END}"
    mine, theirs = recipe.weights(end), recipe.weights(folder / "expected")
    assert mine.keys() == theirs.keys()
    episodes = recipe.traced(folder / "run")
    if not same:
        if episodes != expected["episodes"]:
            pytest.skip("this machine or torch rounds otherwise")
        start = recipe.weights(folder / f"run/checkpoint-{recipe.CHECKPOINT}")
        apart, way = (
            torch.cat([(one[n] - theirs[n]).flatten() for n in theirs]).norm()
            for one in (mine, start)
        )
        assert apart <= CLOSE * way
        return
    assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []
    assert recipe.moments(end) == expected["moments"]
    assert episodes == expected["episodes"]
    log, before = comparable(trainer.state.log_history), comparable(expected["log"])
    assert len(log) == len(before)
    for entry, known in zip(log, before, strict=True):
        assert all(name in entry for name in LOGGED if name in known)
        shared = known.keys() & entry.keys() - GONE
        assert {n: entry[n] for n in shared} == {n: known[n] for n in shared}
