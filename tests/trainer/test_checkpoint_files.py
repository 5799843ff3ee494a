"""Checkpoint folders, killed at every single step of their life: whole or not there, never half."""

import json
import os
import re
import shutil
import zlib

import pytest

from trl_stppo.errors import CheckpointError
from trl_stppo.trainer import disk
from trl_stppo.trainer.disk import (
    MANIFEST,
    STAGING,
    checkpoints,
    complaint,
    discard,
    last_complete,
    next_order,
    prune,
    publish,
    seal,
    tidy,
    to_resume,
)

ABOUT = {"global_step": 5, "resumable": True, "identity": {}, "split": {}, "settings": {}}


class Killed(BaseException):
    """Stands for SIGKILL: nobody catches it."""


def write(folder, text="weights"):
    """What a trainer puts into a checkpoint: files, some in folders."""
    (folder / "critic").mkdir(parents=True)
    (folder / "model.safetensors").write_text(text)
    (folder / "critic" / "model.safetensors").write_text(text * 2)


def save(run_dir, step, text="weights", **about):
    staged = run_dir / STAGING / f"checkpoint-{step}"
    shutil.rmtree(staged.parent, ignore_errors=True)
    write(staged, text)
    order = {"order": next_order(run_dir)}
    seal(staged, {**ABOUT, "global_step": step, **order, **about})
    publish(staged, run_dir / staged.name)


def complete(run_dir) -> list[str]:
    return [folder.name for folder in checkpoints(run_dir) if complaint(folder) is None]


def test_a_saved_checkpoint_is_complete_and_says_what_it_is(tmp_path):
    save(tmp_path, 4)
    assert last_complete(tmp_path) == tmp_path / "checkpoint-4"
    manifest = json.loads((tmp_path / "checkpoint-4" / MANIFEST).read_text())
    assert manifest["global_step"] == 4
    sums = {"model.safetensors": b"weights", "critic/model.safetensors": b"weights" * 2}
    assert manifest["files"] == {name: f"{zlib.crc32(text):08x}" for name, text in sums.items()}
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-4"]


def kill_at(monkeypatch, operation: int) -> None:
    """Die at the n-th operation on the file system, before it or, for removals, in its middle."""
    left = [operation]

    def counted(name, original):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                if name == "rmtree" and args[0].exists():
                    for file in [p for p in args[0].rglob("*") if p.is_file()][:1]:
                        file.unlink()
                raise Killed
            return original(*args, **kwargs)

        return call

    for module, name in ((os, "replace"), (os, "fsync"), (shutil, "rmtree")):
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))


@pytest.mark.parametrize("again", [False, True], ids=["new step", "same step again"])
@pytest.mark.parametrize("operation", range(1, 16))
def test_killed_anywhere_while_saving(operation, again, tmp_path, monkeypatch):
    save(tmp_path, 2, "old")
    step = 2 if again else 3
    with monkeypatch.context() as patch:
        kill_at(patch, operation)
        try:
            save(tmp_path, step, "new")
            prune(tmp_path, 1, None)
            survived = True
        except Killed:
            survived = False
    assert complete(tmp_path) == [p.name for p in checkpoints(tmp_path)], "nothing half-written"
    tidy(tmp_path)
    newest = last_complete(tmp_path)
    text = (newest / "model.safetensors").read_text()
    assert (newest.name, text) in (("checkpoint-2", "old"), (f"checkpoint-{step}", "new"))
    assert not survived or text == "new"
    assert not (tmp_path / STAGING).exists()
    assert not (tmp_path / disk.TRASH).exists()


def test_the_kills_reach_every_operation(tmp_path, monkeypatch):
    save(tmp_path, 2)
    kill_at(monkeypatch, 16)
    save(tmp_path, 2)


def test_a_sealed_checkpoint_that_was_not_renamed_yet_is_used(tmp_path):
    save(tmp_path, 2)
    write(tmp_path / STAGING / "checkpoint-3")
    seal(tmp_path / STAGING / "checkpoint-3", {**ABOUT, "order": 2})
    tidy(tmp_path)
    assert complete(tmp_path) == ["checkpoint-2", "checkpoint-3"]


@pytest.mark.parametrize(("damage", "message"), [
    (lambda f: (f / MANIFEST).write_text("null"), "is damaged ("),
    (lambda f: (f / MANIFEST).write_text("[" * 100_000), "is damaged ("),
    (lambda f: (f / MANIFEST).write_bytes(b"\xff\xfe"), "is damaged ("),
    (lambda f: (f / "critic" / "model.safetensors").unlink(), "lacks the file 'critic/model"),
    (lambda f: (f / "model.safetensors").write_text("x"), "has changed since it was written"),
    (lambda f: (f / "model.safetensors").write_text("weightt"), "has changed since it was written"),
    (lambda f: (f / MANIFEST).unlink(), f"has no {MANIFEST}"),
    (lambda f: (f / MANIFEST).write_text('{"format": 99}'), "has format 99; this version reads"),
])  # fmt: skip
def test_damage_is_named_and_the_one_before_is_taken(damage, message, tmp_path, caplog):
    save(tmp_path, 2)
    save(tmp_path, 10)
    damage(tmp_path / "checkpoint-10")
    with pytest.raises(CheckpointError, match=re.escape(message)):
        to_resume(tmp_path, str(tmp_path / "checkpoint-10"))
    assert last_complete(tmp_path).name == "checkpoint-2"
    assert message in caplog.text
    shutil.rmtree(tmp_path / "checkpoint-2")
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        last_complete(tmp_path)


@pytest.mark.parametrize(("limit", "best", "kept"), [
    (None, None, [1, 2, 9, 10]),
    (0, None, [1, 2, 9, 10]),
    (2, None, [9, 10]),
    (1, None, [10]),
    (2, 1, [1, 10]),
    (1, 1, [1, 10]),
    (3, 10, [2, 9, 10]),
])  # fmt: skip
def test_pruning_spares_the_newest_and_the_best(limit, best, kept, tmp_path):
    for step in (1, 2, 9, 10):
        save(tmp_path, step)
    (tmp_path / "checkpoint-notes").mkdir()
    prune(tmp_path, limit, best and str(tmp_path / f"checkpoint-{best}"))
    assert complete(tmp_path) == [f"checkpoint-{step}" for step in kept]
    assert (tmp_path / "checkpoint-notes").exists()


def test_a_run_that_went_back_keeps_its_own(tmp_path):
    """Steps 5 and 6 are of the branch that it left."""
    for step in (2, 5, 6, 3):
        save(tmp_path, step)
    assert last_complete(tmp_path).name == "checkpoint-3"
    prune(tmp_path, 2, None)
    assert sorted(complete(tmp_path)) == ["checkpoint-3", "checkpoint-6"]


def test_a_deletion_that_was_killed_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1)
    kill_at(monkeypatch, 3)
    with pytest.raises(Killed):
        discard(tmp_path / "checkpoint-1")
    assert checkpoints(tmp_path) == []


def test_every_piece_of_a_file_is_in_its_checksum(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_BLOCK", 4)
    contents = [b"", b"four", b"more than four", b"less than four"]
    paths = [tmp_path / str(number) for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    assert [disk.checksum(path) for path in paths] == [f"{zlib.crc32(content):08x}" for content in contents]
