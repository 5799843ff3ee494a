"""A clock that goes back, as one that is set right or that of another machine: nothing depends on it."""

from __future__ import annotations

import json
import time

import pytest
import torch
from transformers import TrainerCallback

from tests.scripted import EPISODES, scripted_trainer, weights
from trl_stppo import STPPOTrainer
from trl_stppo.trace import read_trace
from trl_stppo.trainer.checkpoints import files

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


def test_a_run_of_the_first_version_goes_on_whatever_its_dates_say(tmp_path, reference):
    """It wrote neither numbers nor checksums, and here its clock was a day ahead."""
    scripted_trainer(tmp_path, **{**RUN, "max_steps": 3})[0].train()
    for number in (1, 2, 3):
        path = tmp_path / f"checkpoint-{number}" / files.MANIFEST
        manifest = json.loads(path.read_text())
        for name in ("order", "crc32"):
            manifest.pop(name, None)
        for name in ("adam_beta1", "adam_beta2", "adam_epsilon"):
            manifest["settings"].pop(name, None)
        path.write_text(json.dumps({**manifest, "saved_at": manifest["saved_at"] + 86400}))
    trainer, _ = scripted_trainer(tmp_path, **RUN, save_total_limit=2)
    trainer.train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-5", "checkpoint-6"]
    assert all(torch.equal(weight, reference[name]) for name, weight in weights(trainer).items())
