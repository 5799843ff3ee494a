"""The paper's configurations: complete, alike where they should be, and runnable for real in small."""

import itertools
import json
import re
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from tests.kit.script_kit import AGENT, ROOT, small_data
from trl_stppo.cli import train

FOLDER = ROOT / "scripts" / "configs" / "paper"
CONFIGS = {path.stem: yaml.safe_load(path.read_text()) for path in FOLDER.glob("*.yaml")}
NAMES = sorted(CONFIGS)
SMALL = (
    "--use_cpu true --optim adamw_torch --per_device_train_batch_size 4 --max_completion_length 200 "
    "--max_turn_tokens 24 --generation_slots 16 --warmup_steps 0 --logging_steps 1 "
    "--save_strategy no --learning_rate 1e-2"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_data(tmp_path_factory.mktemp("data") / "search")


def test_there_is_a_file_for_every_task_size_machine_and_method():
    parts = itertools.product(
        *(("search", "medical"), ("1.5b", "7b"), ("8gpu", "1gpu"), ("ppo", "grpo"))
    )
    assert sorted("_".join(part) for part in parts) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_what_the_paper_and_search_r1_fix_is_the_same_everywhere(name):
    config = CONFIGS[name]
    task, size, machine, method = name.split("_")
    group = 5 if method == "grpo" else 1
    processes = 1 if machine == "1gpu" else 8
    episodes = (
        config["per_device_train_batch_size"] * config["gradient_accumulation_steps"] * processes
    )
    assert episodes == 512 * group
    assert episodes == 256 * config["num_mini_batches"]
    assert config["total_episodes"] == 1005 * episodes
    wanted = {"num_ppo_epochs": 1, "cliprange": None, "max_grad_norm": 1.0, "temperature": 1.0}
    wanted |= {"max_turns": 4, "max_turn_tokens": 500}
    if method == "ppo":
        wanted |= {"cliprange_value": 0.5, "kl_coef": 0.001, "gamma": 1.0, "lam": 1.0}
    else:
        wanted |= {"beta": 0.001, "num_generations": 5}
    if machine == "8gpu":
        wanted["learning_rate"] = 1e-6
        wanted |= {"critic_learning_rate": 1e-5} if method == "ppo" else {}
    assert {key: config.get(key) for key in wanted} == wanted
    environment = {"retriever": "http://127.0.0.1:8000/retrieve", "top_k": 3}
    environment |= {"max_observation_tokens": 500}
    environment |= {"metric": "letter"} if task == "medical" else {}
    assert json.loads(config["environment_kwargs"]) == environment
    assert config["model_name_or_path"] == f"Qwen/Qwen2.5-{size.upper()}-Instruct"
    assert config["dataset_name"] == f"data/{task}"
    assert config["output_dir"].endswith(name)
    assert config.get("use_peft", False) == (machine == "1gpu")
    first_lines = (FOLDER / f"{name}.yaml").read_text()
    assert f"--config scripts/configs/paper/{name}.yaml" in first_lines


def run(name: str, data: str, folder: Path, *flags: str) -> list[dict]:
    """The log of a short training with the file, changed by flags alone."""
    words = [
        "--config", str(FOLDER / f"{name}.yaml"), "--model_name_or_path", AGENT, *SMALL.split(),
    ]  # fmt: skip
    words += ["--dataset_name", data, "--output_dir", str(folder), *flags]
    if "--environment_kwargs" not in flags:
        words += ["--environment_kwargs", '{"retriever": "stdlib", "max_observation_tokens": 60}']
    train.run(words)
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def entries(log: list[dict], name: str) -> list[float]:
    return [entry[name] for entry in log if name in entry]


def test_one_gpu_qlora_trains_on_small_stand_ins(data, tmp_path):
    flags = ("--gradient_accumulation_steps", "4", "--total_episodes", "16", "--eval_episodes", "4")
    log = run("search_1.5b_1gpu_ppo", data, tmp_path, *flags)
    assert len(entries(log, "policy/clip_fraction")) == 2
    assert max(entries(log, "turns/mean")) > 1
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    assert evaluation["after"]["eval_episodes"] == 4
    adapter = load_file(tmp_path / "adapter_model.safetensors")
    assert any(value.abs().max() > 0 for name, value in adapter.items() if "lora_B" in name)
    assert (tmp_path / "critic" / "value_head.safetensors").exists()


def test_grpo_trains_in_groups_without_a_critic(data, tmp_path):
    flags = "--gradient_accumulation_steps 5 --total_episodes 20 --num_mini_batches 1"
    choices = '{"retriever": "stdlib", "max_observation_tokens": 60, "metric": "letter"}'
    words = ("--environment_kwargs", choices, "--variant", "st-grpo")
    log = run("medical_1.5b_1gpu_grpo", data, tmp_path, *flags.split(), *words)
    assert len(entries(log, "policy/clip_fraction")) == 1
    assert entries(log, "kl")
    assert not (tmp_path / "critic").exists()


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("search")])
def test_the_table_says_what_the_file_says(name):
    text = (FOLDER / f"{name}.yaml").read_text()
    launched = re.search(r"--config_file (\S+)", text)
    assert launched is None or (ROOT / launched[1]).is_file()
    how = f"`{Path(launched[1]).name}`" if launched else "one process"
    assert f"| `{name}.yaml` | {how} |" in (FOLDER / "README.md").read_text()
