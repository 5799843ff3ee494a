"""What each `hub_strategy` uploads, and that a run goes on from what it finds there."""

import threading
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from transformers import TrainerCallback

from tests.hub.hub_kit import REPO, letters, run
from tests.kit.scripted import assert_same_weights
from tests.kit.waiting import PATIENCE
from trl_stppo.errors import CheckpointError

STEPS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "push_to_hub": True}
POLICY = {"config.json", "model.safetensors", "tokenizer.json", "agent.json", "README.md"}
SECRET = [{"role": "user", "content": "what nobody else may read"}]
CRITIC = {"critic/config.json", "critic/model.safetensors"}
STATE = {"optimizer.pt", "run_state.pt", "scheduler.pt", "stppo_checkpoint.json"}


class StopAt(TrainerCallback):
    """Ends a run early, as a kill would, but for the checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "folders"),
    [("end", ()), ("every_save", ()), ("all_checkpoints", ("checkpoint-2", "checkpoint-4"))],
)
def test_each_strategy_uploads_the_agent_and_run_state_only_in_checkpoints(hub, tmp_path, strategy, folders):
    trainer = run(tmp_path / "run", hub_strategy=strategy, hub_always_push=True, **STEPS)
    trainer.train()
    files = hub.repos[REPO].files
    saved = tmp_path / "run" / "checkpoint-4"
    if strategy == "end":
        assert set(files) == {".gitattributes"}
        trainer.push_to_hub()
        files = hub.repos[REPO].files
    assert set(files) >= POLICY | CRITIC
    for name in ("model.safetensors", "critic/model.safetensors", "agent.json"):
        assert files[name] == (saved / name).read_bytes(), name
    inside = {path.split("/")[0] for path in files if "/" in path}
    assert inside - {"critic"} == set(folders)
    assert not STATE & {path.split("/")[-1] for path in files if path.split("/")[0] not in folders}
    inside = STATE | POLICY - {"README.md"} | CRITIC
    assert {f"{folder}/{name}" for folder in folders for name in inside} <= set(files)


@pytest.mark.long
def test_a_run_goes_on_from_the_last_checkpoint_in_a_repository(hub, tmp_path):
    rows = {"train_dataset": letters().map(lambda row: {"prompt": SECRET})}
    whole = run(tmp_path / "whole", max_steps=4, arguments=rows)
    whole.train()
    first = run(tmp_path / "first", hub_strategy="checkpoint", arguments=rows, **STEPS)
    first.add_callback(StopAt(2))
    first.train()
    assert first.state.global_step == 2
    words = SECRET[0]["content"].encode()
    assert [name for name, content in hub.repos[REPO].files.items() if words in content] == []

    folder = tmp_path / "second"
    snapshot_download(REPO, local_dir=folder)
    assert not list(folder.rglob("training_args.bin"))
    second = run(folder, hub_strategy="checkpoint", arguments=rows, **STEPS)
    second.train(resume_from_checkpoint="last-checkpoint")
    assert_same_weights(second, whole)
    second.push_to_hub()
    pushed = hub.repos[REPO].files
    saved = (folder / "checkpoint-4" / "optimizer.pt").read_bytes()
    assert pushed["last-checkpoint/optimizer.pt"] == saved
    with pytest.raises(CheckpointError, match="is not a folder"):
        second.train(resume_from_checkpoint="no-checkpoint")


@pytest.mark.long
def test_a_checkpoint_stays_until_it_is_uploaded(hub, tmp_path):
    release, seen = threading.Event(), {}

    def hold(line: str) -> None:
        if "/preupload/" in line:
            release.wait(2 * PATIENCE)

    hub.before = hold
    options = {**STEPS, "save_steps": 1, "save_total_limit": 1, "num_mini_batches": 1}
    trainer = run(tmp_path / "run", hub_strategy="checkpoint", **options)

    class Watch(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            found = Path(args.output_dir).glob("checkpoint-*")
            seen[state.global_step] = {path.name for path in found}
            if state.global_step == 4:
                release.set()

    trainer.add_callback(Watch())
    trainer.train()
    assert seen[4] == {"checkpoint-1", "checkpoint-4"}
    files = hub.repos[REPO].files
    assert "last-checkpoint/stppo_checkpoint.json" in files
    left = [p.name for p in (tmp_path / "run").glob("checkpoint-*")]
    assert left == ["checkpoint-4"]
