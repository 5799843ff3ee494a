"""What a push uploads: named files and fields, so that no secret of the settings reaches the Hub."""

import pytest

from tests.hub.hub_kit import REPO, run, saved_base
from tests.hub.hub_server import TOKEN
from tests.kit.fakes import CountEnv

KEY = "planted-key-1"


class LeakyEnv(CountEnv):
    """Says its key in the errors of every second episode."""

    def __init__(self, api_key=""):
        super().__init__()
        self.api_key = api_key

    def reset(self, **row):
        self.fails = row["letter"] in "aceg"
        return super().reset(**row)

    def step(self, action):
        if self.fails:
            raise RuntimeError(self.api_key)
        return super().step(action)


@pytest.mark.long
def test_no_secret_of_the_settings_reaches_the_hub(hub, tmp_path):
    folder = tmp_path / "run"
    trainer = run(
        folder,
        arguments={
            "model": saved_base(tmp_path / "base"),
            "environment_factory": lambda: LeakyEnv(KEY),
        },
        model_init_kwargs={"token": TOKEN, "dtype": "float32"},
        **{"hub_token": TOKEN, "reward_model_path": KEY, "run_name": KEY, "project": KEY},
        **{"vllm_server_base_url": f"http://me:{KEY}@localhost:1", "trace_episodes": 8},
        **{"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "log_completions": True},
        **{"push_to_hub": True, "hub_always_push": True, "hub_strategy": "all_checkpoints"},
    )
    trainer.train()
    # Upstream saves the settings with all of their tokens.
    assert TOKEN.encode() in (folder / "training_args.bin").read_bytes()
    assert KEY in (folder / "metrics.jsonl").read_text()
    (folder / "notes.json").write_text(KEY)
    (folder / "critic" / "notes.txt").write_text(KEY)
    trainer.push_to_hub()
    files = hub.repos[REPO].files
    assert {"README.md", "agent.json", "checkpoint-4/optimizer.pt"} <= set(files)
    names = {path.split("/")[-1] for path in files}
    assert not names & {"training_args.bin", "notes.json", "notes.txt", "metrics.jsonl"}
    assert not any(path.startswith("completions/") for path in files)
    leaks = [n for n, data in files.items() for s in (TOKEN, KEY) if s.encode() in data]
    assert leaks == []
