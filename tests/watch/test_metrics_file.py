"""The log that is written as a run goes: whole, once, and never in the way of the training."""

import logging
import shutil
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from tests.kit.scripted import scripted_trainer, train
from trl_stppo.watch import read_run
from trl_stppo.watch.metrics_file import MetricsFile

SETTINGS = {
    **{"max_steps": 6, "num_ppo_epochs": 2, "rows": 32, "seed": 3},
    **{"save_strategy": "steps", "save_steps": 2, "variant": "st-ppo"},
}


def without_times(history):
    timed = ("seconds", "per_second", "runtime", "memory", "step_time", "Time taken")
    return [{k: v for k, v in e.items() if not any(t in k for t in timed)} for e in history]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "out"
    trainer, _ = train(folder, **SETTINGS)
    return folder, trainer


def test_it_holds_the_whole_log_and_the_settings(finished):
    folder, trainer = finished
    run = read_run(folder)
    assert run.history == trainer.state.log_history
    assert (run.settings["variant"], run.settings["seed"]) == ("st-ppo", 3)
    assert run.settings["num_ppo_epochs"] == 2
    task = {name: run.settings[name] for name in ("model", "environment", "dataset")}
    assert task == {
        "model": type(trainer.model).__name__,
        "environment": "play_script",
        "dataset": "32 rows",
    }
    assert "hub_token" not in run.settings
    assert "cliprange_value" not in run.settings, "what is as usual is left out"


def test_a_run_that_was_killed_and_resumed_has_every_entry_once(finished, tmp_path):
    folder, trainer = finished
    killed = tmp_path / "out"
    shutil.copytree(folder, killed)
    shutil.rmtree(killed / "checkpoint-6")
    file = killed / "metrics.jsonl"
    *whole, last, _ = file.read_text().split("\n")
    file.write_text("\n".join([*whole[:-1], last[:20]]))
    assert [e["step"] for e in read_run(killed).history] == [1, 2, 3, 4, 5]
    resumed, _ = train_on(killed)
    assert without_times(read_run(killed).history) == without_times(resumed.state.log_history)
    steps = [e["step"] for e in read_run(killed).history]
    assert steps == [e["step"] for e in trainer.state.log_history] == [1, 2, 3, 4, 5, 6, 6]
    assert not (killed / "metrics.previous.jsonl").exists()


def train_on(folder):
    trainer, recorder = scripted_trainer(folder, **SETTINGS)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    return trainer, recorder


@dataclass
class Settings:
    output_dir: str
    seed: int = 1


def state(step: int = 0, *history: dict) -> SimpleNamespace:
    return SimpleNamespace(is_world_process_zero=True, global_step=step, log_history=[*history])


def log(writer: MetricsFile, at: SimpleNamespace, entry: dict) -> None:
    at.log_history.append(entry)
    writer.on_log(None, at, None)


def test_a_new_run_keeps_the_log_of_the_one_before(tmp_path, caplog):
    for step in (1, 2, 3):
        writer, at = MetricsFile(), state()
        writer.on_train_begin(Settings(str(tmp_path)), at, None)
        log(writer, at, {"a": step, "step": step})
    for step, name in enumerate((".previous", ".previous-2", ""), 1):
        assert [e["step"] for e in read_run(tmp_path / f"metrics{name}.jsonl").history] == [step]
        assert f"now metrics{name}.jsonl" in caplog.text or not name


def test_a_disk_that_is_full_costs_a_warning(tmp_path, caplog, monkeypatch):
    writer, at = MetricsFile(), state()
    writer.on_train_begin(Settings(str(tmp_path)), at, None)
    path = tmp_path / "metrics.jsonl"
    path.unlink()
    path.mkdir()
    with caplog.at_level(logging.WARNING):
        log(writer, at, {"a": 1, "step": 1})
        log(writer, at, {"a": 1, "step": 2})
    assert [str(path) in record.getMessage() for record in caplog.records] == [True]
    caplog.clear()
    (tmp_path / "file").write_text("")
    writer.on_train_begin(Settings(str(tmp_path / "file" / "run")), at, None)
    log(writer, at, {"a": 1, "step": 1})
    assert len(caplog.records) == 1


def test_an_evaluation_before_the_training_is_part_of_its_log(tmp_path):
    writer, at = MetricsFile(), state()
    before = {"eval_episode/score": 0.5, "eval_runtime": 1.0, "step": 0}
    log(writer, state(), before)
    other = state()
    other.is_world_process_zero = False
    MetricsFile().on_train_begin(Settings(str(tmp_path)), other, None)
    assert list(tmp_path.iterdir()) == []
    writer.on_train_begin(Settings(str(tmp_path)), at, None)
    log(writer, at, {"a": 1, "step": 1})
    assert read_run(tmp_path).history == at.log_history == [before, {"a": 1, "step": 1}]
    writer, resumed = MetricsFile(), state(1, *at.log_history)
    log(writer, state(), {**before, "eval_episode/score": 0.9})
    writer.on_train_begin(Settings(str(tmp_path)), resumed, None)
    log(writer, resumed, {"a": 2, "step": 2})
    assert read_run(tmp_path).history == [*at.log_history, {"a": 2, "step": 2}]
