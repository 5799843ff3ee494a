"""A checkpoint that cannot be written, read or gone on from: a clear error, and nothing lost."""

import errno
import os
import shutil
import signal

import pytest
import torch
from peft import LoraConfig

from tests.kit.builders import at_step
from tests.kit.fakes import char_tokenizer, tiny_policy, tiny_value_model
from tests.kit.scripted import (
    assert_same_run,
    assert_same_weights,
    numbered_rows,
    scripted_trainer,
    weights,
)
from tests.kit.tiers import quick
from trl_stppo import STPPOTrainer
from trl_stppo.errors import CheckpointError, CheckpointWriteError
from trl_stppo.trainer import disk

RUN = {
    "trainer_class": STPPOTrainer,
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_mini_batches": 2,
    "num_ppo_epochs": 2,
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 1,
}


FINER = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


def build(folder, rank=4, **options):
    tokenizer = char_tokenizer()
    torch.manual_seed(3)
    if rank:
        lora = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
        arguments = {"peft_config": lora}
    else:
        arguments = {"value_model": tiny_value_model(tokenizer)}
    arguments["model"] = tiny_policy(tokenizer)
    return scripted_trainer(folder, **{**RUN, **arguments, **options})[0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trainer = build(folder)
    trainer.train()
    return folder, trainer


@pytest.mark.parametrize(("options", "message"), [
    ({"variant": "ppo"}, "a run with variant='s-ppo'; this one has variant='ppo'"),
    ({"rank": 2}, r"adapter=\{'type': 'LORA', 'r': 4"),
    ({"rank": 0}, "critic='shared'; this one has critic='separate'"),
    ({"seed": 7}, "seed=42; this one has seed=7"),
    ({"rows": 24}, "rows=8; this one has rows=24"),
    ({"per_device_train_batch_size": 8, "rows": 16}, "rows=8; this one has rows=16"),
    ({"num_ppo_epochs": 3}, "epochs=2; this one has epochs=3"),
    ({"num_mini_batches": 1}, "mini_batches=2; this one has mini_batches=1"),
])  # fmt: skip
def test_a_checkpoint_of_another_kind_of_run_is_refused(options, message, finished, tmp_path):
    folder, _ = finished
    trainer = build(tmp_path, **options)
    before = weights(trainer)
    with pytest.raises(CheckpointError, match=message):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert all(torch.equal(w, before[n]) for n, w in weights(trainer).items()), "nothing changed"
    assert trainer.state.global_step == 0


@pytest.mark.long
def test_another_split_into_micro_batches_goes_on_and_is_named(finished, tmp_path, caplog):
    folder, _ = finished
    trainer = build(tmp_path, **FINER)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    assert "micro_batches was 2 and is 4 now" in caplog.text
    assert trainer.state.global_step == 6
    assert trainer._step == 4


def of_two_processes(source, folder):
    """A checkpoint as two processes would have written it."""
    shutil.copytree(source, folder)
    path = folder / disk.MANIFEST
    path.write_text(path.read_text().replace('"processes": 1', '"processes": 2'))
    return str(folder)


@pytest.mark.long
def test_another_number_of_processes(finished, tmp_path, caplog):
    trainer = build(tmp_path)
    outside = of_two_processes(finished[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    trainer.train(resume_from_checkpoint=outside)
    assert "processes was 2 and is 1 now" in caplog.text
    assert trainer.state.global_step == 6


def test_the_newest_complete_checkpoint_is_taken(finished, tmp_path, caplog):
    """The newest one lacks a file, so that the one before it continues the run."""
    source, reference = finished
    folder = tmp_path / "copy"
    shutil.copytree(source, folder)
    (folder / "checkpoint-6" / "critic" / "value_head.safetensors").unlink()
    trainer = build(folder)
    trainer.train(resume_from_checkpoint=True)
    assert_same_weights(trainer, reference)
    assert disk.complaint(folder / "checkpoint-6") is None, "written again"
    assert "this run ends with step" not in caplog.text
    trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-6 is of step 6, and this run ends with step 6" in caplog.text


@pytest.mark.long
def test_auto_begins_where_there_is_nothing_and_goes_on_where_there_is(tmp_path, finished):
    first = build(tmp_path, max_steps=4)
    first.train(resume_from_checkpoint="auto")
    assert first.state.global_step == 4
    second = build(tmp_path)
    second.train(resume_from_checkpoint="auto")
    assert_same_weights(second, finished[1])


def test_a_checkpoint_without_optimizer_is_refused(tmp_path):
    trainer = build(tmp_path, save_only_model=True, max_steps=1)
    trainer.train()
    with pytest.raises(CheckpointError, match="save_only_model=True and has no optimizer state"):
        build(tmp_path).train(resume_from_checkpoint=True)


class FullDisk:
    """Lets so many bytes be written by torch.save, then none."""

    def __init__(self, monkeypatch, calls: int) -> None:
        self.left, self.original = calls, torch.save
        monkeypatch.setattr(torch, "save", self)

    def __call__(self, state, path, *args, **kwargs):
        self.left -= 1
        if self.left < 0:
            with open(path, "wb") as file:
                file.write(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return self.original(state, path, *args, **kwargs)


@pytest.mark.long
@pytest.mark.parametrize("calls", quick([0, 2, 4], 2))
def test_a_full_disk_leaves_the_older_checkpoint_and_nothing_else(calls, tmp_path, monkeypatch):
    """The error names path, cause and remedy; what is there continues bit for bit."""
    reference = build(tmp_path / "reference", save_strategy="no")
    reference.train()
    folder = tmp_path / "run"
    trainer = build(folder)
    save = trainer._save_checkpoint

    def full_at_six(model, trial):
        if trainer.state.global_step == 6:
            FullDisk(monkeypatch, calls)
        save(model, trial)

    trainer._save_checkpoint = full_at_six
    with pytest.raises(CheckpointWriteError, match="checkpoint of step 6 could not be written") as e:
        trainer.train()
    assert "No space left on device" in str(e.value)
    assert "newest complete checkpoint is " + str(folder / "checkpoint-4") in str(e.value)
    monkeypatch.undo()
    assert sorted(p.name for p in folder.glob("*check*")) == ["checkpoint-4"]
    assert not (folder / disk.STAGING).exists()
    resumed = build(folder)
    resumed.train(resume_from_checkpoint=True)
    assert_same_run(resumed, reference)


BEST = {
    "load_best_model_at_end": True, "metric_for_best_model": "eval_episode/score",
    "greater_is_better": True, "eval_strategy": "steps", "eval_steps": 1,
}  # fmt: skip


@pytest.mark.long
def test_the_best_checkpoint_is_found_again_where_the_folder_was_moved(tmp_path):
    options = {**BEST, "eval_dataset": numbered_rows(), "save_total_limit": 2}
    build(tmp_path / "here", max_steps=4, **options).train()
    shutil.move(tmp_path / "here", tmp_path / "there")
    trainer = build(tmp_path / "there", **options)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "there" / "checkpoint-4")
    names = [folder.name for folder in disk.checkpoints(tmp_path / "there")]
    assert names == ["checkpoint-4", "checkpoint-6"]


def terminated(after):
    """A signal to this process at the beginning of a step."""
    return at_step("on_step_begin", after, lambda: os.kill(os.getpid(), signal.SIGTERM))


@pytest.mark.long
def test_the_last_checkpoint_is_kept_beside_the_best_one(tmp_path):
    """Upstream deletes all but the best one at the end, where only one is to be kept."""
    trainer = build(tmp_path, **BEST, eval_dataset=numbered_rows(), save_total_limit=1, max_steps=12)
    trainer.add_callback(terminated(after=5))
    trainer.train()
    names = [folder.name for folder in disk.checkpoints(tmp_path)]
    assert names == ["checkpoint-4", "checkpoint-8"]


def test_a_signal_in_the_last_step_is_no_early_end(tmp_path):
    trainer = build(tmp_path, max_steps=2, save_steps=100)
    trainer.add_callback(terminated(after=1))
    trainer.train()
    assert (trainer.stop_reason, trainer.stop_signal) == (None, signal.SIGTERM)
    assert disk.last_complete(tmp_path).name == "checkpoint-2"


def test_the_manifest_names_the_settings_of_the_algorithm_and_no_others(tmp_path):
    trainer = build(tmp_path, max_steps=1, hub_token="hf_secret", save_total_limit=3)
    trainer.train()
    folder = tmp_path / "checkpoint-1"
    text = (folder / disk.MANIFEST).read_text()
    assert "hf_secret" not in text
    settings = disk.read_manifest(folder)["settings"]
    assert {"kl_coef", "variant", "learning_rate", "gamma"} <= settings.keys()
    assert not any(
        "token" in n and n not in ("stop_token", "stop_token_id", "max_turn_tokens") for n in settings
    )
    assert not {"output_dir", "save_total_limit", "run_name"} & settings.keys()
    kept = torch.load(folder / "training_args.bin", weights_only=False)
    assert kept.save_total_limit == 3
