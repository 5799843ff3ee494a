"""A clock that goes back, as one that is set right or that of another machine: nothing depends on it."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import TrainerCallback

from tests.scripted import EPISODES, scripted_trainer, weights
from trl_stppo import STPPOTrainer
from trl_stppo.trace import read_trace
from trl_stppo.trainer.disk import files

RUN = {
    "trainer_class": STPPOTrainer,
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "rows": 2 * EPISODES,
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 1,
    "trace_episodes": 1,
}
BACK = 2 * 3600


class SetBack(TrainerCallback):
    """Sets the clock back before a step, for good."""

    def __init__(self, monkeypatch, step: int) -> None:
        self._monkeypatch, self._step = monkeypatch, step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self._step:
            now = time.time
            self._monkeypatch.setattr(time, "time", lambda: now() - BACK)


def names(folder) -> list[str]:
    return [path.name for path in files.checkpoints(folder)]


def updates(folder) -> list[int]:
    return [episode.update.update for episode in read_trace(folder)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    trainer, _ = scripted_trainer(tmp_path_factory.mktemp("whole"), **RUN)
    trainer.train()
    return weights(trainer)


def test_the_newest_checkpoints_stay_and_the_run_goes_on_from_the_last(
    tmp_path, monkeypatch, reference
):
    options = {**RUN, "save_total_limit": 2}
    callbacks = [SetBack(monkeypatch, step=3)]
    first, _ = scripted_trainer(tmp_path, **{**options, "max_steps": 4}, callbacks=callbacks)
    first.train()
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    monkeypatch.undo()
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 24 * BACK)
    second, _ = scripted_trainer(tmp_path, **options)
    second.train(resume_from_checkpoint=True)
    assert second._checkpoints.last == tmp_path / "checkpoint-6"
    assert names(tmp_path) == ["checkpoint-5", "checkpoint-6"]
    assert all(torch.equal(weight, reference[name]) for name, weight in weights(second).items())
    assert updates(tmp_path) == [1, 2, 3, 4, 5, 6]
