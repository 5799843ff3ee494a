"""`trl-stppo train`, on one small rollout batch, and the parts that it shares with others."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.hub import conftest as hub_fixtures
from tests.hub.hub_server import TOKEN
from tests.kit.script_kit import AGENT, ROOT, SCRIPTS, question_rows
from trl_stppo.cli import agents, objects, train
from trl_stppo.cli.flags import TrainArguments
from trl_stppo.cli.main import main

local_hub = hub_fixtures.hub
FLAGS = """
    --config scripts/configs/demo.yaml --per_device_train_batch_size 4 --total_episodes 16
    --num_ppo_epochs 2 --num_mini_batches 2 --eval_episodes 8 --per_device_eval_batch_size 8
    --logging_steps 1
"""


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/train_stppo.py", *FLAGS.split(), *flags], cwd=ROOT,
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip


@pytest.mark.long
def test_demo_leaves_a_table_a_log_and_a_model_that_loads(local_hub, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    tmp_path = tmp_path / "run"
    pushed = ["--push_to_hub", "true", "--hub_model_id", "me/demo"]
    words = [*FLAGS.split(), "--output_dir", str(tmp_path), *pushed]
    secret = ["--hub_token", TOKEN, "--model_init_kwargs", f'{{"token": "{TOKEN}"}}']
    train.run([*words, *secret])
    shown = capsys.readouterr().out
    assert TOKEN not in shown
    repo = local_hub.repos["me/demo"]
    assert repo.messages == ["initial commit", "End of training"], "one push, with the evaluation"
    assert {"model.safetensors", "README.md"} <= set(repo.files)
    assert not any(TOKEN.encode() in data for data in repo.files.values())
    first, *lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first_entry, held_out = json.loads(lines[0]), "eval_episode/success_rate"
    assert first_entry["step"] == 0, "the evaluation before training"
    found = json.loads((tmp_path / "evaluation.json").read_text())
    assert found["before"][held_out] == first_entry[held_out]
    assert found["after"][held_out] == json.loads(lines[-1])[held_out]
    assert "eval_on_start" not in first
    assert "| held-out rows |" in (tmp_path / "README.md").read_text()
    known = json.loads(first)["settings"]
    assert known["environment"].startswith("StdlibSearchEnv")
    assert known["model"] == "assets/search-agent"
    assert known["dataset"].split(",")[0] == "stdlib-search"
    log = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert any("clip_bias/norm_estimate" in entry for entry in log)
    assert sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tmp_path).parameters()) > 1e5
    assert (tmp_path / "critic" / "model.safetensors").exists()


OWN = str(SCRIPTS / "configs" / "own_task.yaml")


def test_the_sample_of_a_task_of_ones_own_is_sound(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(ROOT)
    words = ["scripts.configs.own_task.lookup:LookupEnv", "--strict"]
    rows = "scripts/configs/own_task/train.jsonl"
    assert main(["env", "check", *words, "--rows", rows]) == 0
    assert main(["train", "--config", OWN, "--dry_run", "--output_dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "LookupEnv" in shown
    assert "own_task, 32" in shown


class Capped:
    """As much of an environment as a factory's arguments need."""

    def __init__(self, max_observation_tokens=50, count_tokens=None):
        self.cap, self.count = max_observation_tokens, count_tokens


@pytest.mark.parametrize(("arguments", "bound"), [
    (None, True),
    ('{"max_observation_tokens": 9}', True),
    ('{"max_observation_tokens": null}', False),
])  # fmt: skip
def test_tokens_are_counted_where_the_environment_caps_them(arguments, bound):
    factory = objects.factory_of(f"{__name__}:Capped", arguments, len)
    assert (getattr(factory(), "count", None) is len) == bound


def test_the_counter_counts_the_models_tokens_and_travels():
    counter = agents.token_counter(AGENT)
    text = "Which class defines the method writerow?"
    expected = len(AutoTokenizer.from_pretrained(AGENT)(text, add_special_tokens=False).input_ids)
    assert counter(text) == expected > 1
    loaded = agents._tokenizer.cache_info().misses
    assert copy.deepcopy(counter)(text) == pickle.loads(pickle.dumps(counter))(text) == expected
    assert agents._tokenizer.cache_info().misses == loaded


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
def test_a_file_of_rows_is_the_training_split(ending, tmp_path):
    rows = Dataset.from_dict({"prompt": ["a", "b"], "number": [1, 2]})
    path = tmp_path / f"rows.{ending}"
    getattr(rows, f"to_{ending.replace('jsonl', 'json')}")(str(path))
    for streaming in (False, True):
        named = agents.AgentArguments(dataset_name=str(path), dataset_streaming=streaming)
        train, held_out = agents.load_splits(named)
        assert list(train) == [{"prompt": "a", "number": 1}, {"prompt": "b", "number": 2}]
        assert held_out is None
    with pytest.raises(ValueError, match=r"must end in \.jsonl, \.json, \.csv, \.parquet"):
        agents.load_splits(agents.AgentArguments(dataset_name=__file__))


def test_a_stream_and_options_of_loading_reach_the_trainer(tmp_path):
    """A policy's `model_init_kwargs` are kept beside the flags."""
    for split, count in (("train", 8), ("test", 5)):
        rows = Dataset.from_dict(question_rows(["nq"] * count, split))
        rows.to_json(str(tmp_path / f"{split}.jsonl"))
    flags = [
        "--config", "scripts/configs/demo.yaml", "--use_cpu", "true", "--dataset_name",
        str(tmp_path),
    ]  # fmt: skip
    flags += ["--dataset_streaming", "true", "--eval_episodes", "3"]
    flags += ["--model_init_kwargs", '{"low_cpu_mem_usage": true}']
    *parsed, _ = agents.parse_flags(TrainArguments, flags)

    class Given(dict):
        has_critic = True

    given = train.make_trainer(*parsed, Given)
    assert given["args"].model_init_kwargs["low_cpu_mem_usage"] is True
    assert given["args"].model_init_kwargs["dtype"] == "float32"
    assert not hasattr(given["train_dataset"], "__len__")
    assert len(list(given["train_dataset"])) == 8
    assert given["train_dataset"].info.dataset_name == tmp_path.name
    assert len(given["eval_dataset"]) == 3
