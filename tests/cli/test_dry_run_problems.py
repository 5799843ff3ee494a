"""`trl-stppo train --dry_run`: what would not start says why.

One case for each check that is called; the checks themselves have their own tests.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from datasets import Dataset

from tests.script_kit import DEMO, LAUNCHES, small_data
from trl_stppo.trainer.checkpoints import files
from trl_stppo.trainer.setup import packages


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--variant", "so-ppo"], "`variant='so-ppo'`: allowed are 'ppo'"),
        (["--environment", "SearchEnv"], "write it as module:name"),
        (["--environment", "none", "--max_turns", "3"], "`max_turns=3` limits episodes"),
        (["--load_in_4bit", "true"], "Set `use_peft: true`"),
        (["--critic_lora_r", "4"], "`critic_lora_r=4` is the rank"),
        (["--value_model_lora_r", "0"], "value_model_lora_r >= 1"),
        (["--model_name_or_path", "./nowhere"], "`model_name_or_path=./nowhere` is no file"),
        (["--dataset_name", "nowhere.jsonl"], "`dataset_name=nowhere.jsonl` is no file or folder here"),
        (["--reward_funcs", "trl_stppo.recipes.search.rewards:nothing"], "has no attribute 'nothing'"),
        (["--dry_run_processes", "0"], "`dry_run_processes=0`"),
        (["--dry_run_accelerate_config", "nowhere.yaml"], "nowhere.yaml` does not exist"),
        (["--sync_ref_model", "true", "--beta", "0.1", "--use_peft", "true"], "`sync_ref_model=True`"),
        (["--reward_weights", "1", "2"], "`reward_weights` has 2 entries for 0 reward functions"),
        (["--turn_reward_weights", "1"], "`turn_reward_weights` has 1 entries for 0 turn"),
        (["--resume_from_checkpoint", "/nowhere"], "`resume_from_checkpoint='/nowhere'` is not a"),
        (["--eval_strategy", "steps", "--eval_steps", "9", "--dataset_test_split", "dev",
          "--eval_episodes", "0", "--dataset_name", "DATA"], "`eval_strategy=steps`, but"),
        (["--output_dir", f"{__file__}/run"], "test_dry_run_problems.py is a file"),
        (["--use_peft", "true", "--lora_target_modules", "nosuch"], "nosuch"),
        (["--eval_environment_kwargs", "top_k=3"], "`eval_environment_kwargs=top_k=3` is no JSON"),
        (["--report_to", "nobody"], "nobody is not supported, only azure_ml"),
    ],
)  # fmt: skip
def test_what_a_training_refuses_is_refused_here(flags, said, dry_run, tmp_path):
    flags = [small_data(tmp_path / "data") if word == "DATA" else word for word in flags]
    code, shown = dry_run("--config", DEMO, "--output_dir", str(tmp_path / "run"), *flags)
    assert code == 1
    assert said in shown
    assert "this would not start" in shown


def test_too_few_rows_are_repeated_and_it_says_so(dry_run, tmp_path):
    code, shown = dry_run(
        *("--config", DEMO, "--output_dir", str(tmp_path / "run")),
        *("--per_device_train_batch_size", "800"),
    )
    assert code == 0
    assert "fewer than the 12800 prompts" in shown
    assert "repeated 8 times" in shown


def test_all_problems_are_shown_at_once(dry_run):
    code, shown = dry_run(
        *("--config", DEMO, "--environment", "SearchEnv", "--load_in_8bit", "true")
    )
    assert code == 1
    assert "2 problems" in shown


@pytest.mark.parametrize(
    ("engine", "flags", "said"),
    [
        ("zero3", [], "A copied critic of a fully trained policy is not supported with ZeRO-3"),
        ("zero3", ["--use_peft", "true"], "A shared critic of a LoRA policy is not supported"),
        ("multi_gpu", ["--fp16", "true"], "`fp16=True` is not supported"),
    ],
)
def test_what_an_engine_refuses_is_refused_here(engine, flags, said, dry_run):
    path = LAUNCHES / f"{engine}.yaml"
    code, shown = dry_run("--config", DEMO, "--dry_run_accelerate_config", str(path), *flags)
    assert code == 1
    assert said in shown


@pytest.mark.parametrize(
    ("engine", "before", "after", "said"),
    [
        ("zero2", "offload_param_device: none", "offload_param_device: cpu", "`offload_param` to"),
        ("fsdp2", "offload_params: false", "offload_params: true", "`fsdp_offload_params: true`"),
        ("fsdp2", "fsdp_version: 2", "fsdp_version: 1", "FSDP1 is not supported"),
        ("zero2", "zero_stage: 2", "zero_stage: 0", "ZeRO-0 is not supported"),
        ("zero2", "zero_stage: 2", "zero_stage: 2\n  deepspeed_config_file: {}/three.json",
         "When using `deepspeed_config_file`, the following accelerate config variables"),
        ("multi_gpu", "mixed_precision: bf16", "mixed_precision: fp16", "Mixed precision 'fp16'"),
        ("multi_gpu", "num_processes: 8", "num_processes: auto", "`num_processes: auto` in"),
        ("multi_gpu", "MULTI_GPU", "MEGATRON_LM", "`distributed_type=MEGATRON_LM`"),
    ],
)  # fmt: skip
def test_options_of_an_engine_are_read_from_its_file(
    engine, before, after, said, dry_run, tmp_path
):
    (tmp_path / "three.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    text = (LAUNCHES / f"{engine}.yaml").read_text()
    assert before in text
    (tmp_path / "mine.yaml").write_text(text.replace(before, after.format(tmp_path)))
    code, shown = dry_run(
        *("--config", DEMO, "--dry_run_accelerate_config", str(tmp_path / "mine.yaml"))
    )
    assert code == 1
    assert said in shown


def test_deepspeeds_own_file_is_read(dry_run, tmp_path):
    (tmp_path / "three.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    own = f"  deepspeed_config_file: {tmp_path}/three.json"
    lines = ["distributed_type: DEEPSPEED", "num_processes: 2", "deepspeed_config:", own]
    (tmp_path / "mine.yaml").write_text("\n".join(lines))
    flags = ("--config", DEMO, "--dry_run_accelerate_config", str(tmp_path / "mine.yaml"))
    said = "A copied critic of a fully trained policy is not supported with ZeRO-3"
    assert said in dry_run(*flags)[1]
    (tmp_path / "mine.yaml").write_text("")
    assert "mine.yaml` holds no settings" in dry_run(*flags)[1]


def test_data_that_is_here_is_checked(dry_run, tmp_path):
    data = small_data(tmp_path / "search")
    flags = ("--config", DEMO, "--eval_episodes", "4", "--per_device_train_batch_size", "4")
    code, shown = dry_run(*flags, "--dataset_name", data)
    assert code == 0, shown
    assert "here, 64 rows" in shown
    code, shown = dry_run(*flags, "--dataset_name", data, "--dataset_train_split", "training")
    assert code == 1
    assert "`dataset_train_split='training'`" in shown
    code, shown = dry_run(*flags, "--dataset_name", data, "--dataset_test_split", "dev")
    assert code == 1
    assert "has no split 'dev'" in shown


def test_rows_without_a_prompt_are_found(dry_run, tmp_path):
    Dataset.from_dict({"text": ["a"] * 64}).to_parquet(str(tmp_path / "train.parquet"))
    flags = ("--dataset_name", str(tmp_path), "--environment", "none", "--eval_episodes", "0")
    rewards = ("--reward_funcs", "trl_stppo.recipes.search.rewards:f1_reward")
    text = re.sub(r"max_turn.*|environment.*", "", Path(DEMO).read_text())
    (tmp_path / "alone.yaml").write_text(text)
    config = str(tmp_path / "alone.yaml")
    code, shown = dry_run(
        "--config", config, *flags, *rewards, "--per_device_train_batch_size", "1"
    )
    assert code == 1
    assert "neither `prompt`" in shown
    plain = ("--eval_episodes", "0", "--per_device_train_batch_size", "1")
    env = ("--environment", "tests.check_env_cases:Clean", "--environment_kwargs", "{}")
    code, shown = dry_run("--config", DEMO, "--dataset_name", str(tmp_path), *plain, *env)
    assert code == 0, "the environment may have the task"
    assert "note: `train_dataset` has the columns ['text'] and no `prompt`: the model" in shown


def test_environments_that_break_their_contract_are_found(dry_run, tmp_path):
    """By the words of `env check`, before anything is loaded."""
    plain = ("--eval_episodes", "0", "--per_device_train_batch_size", "1")
    Dataset.from_dict({"prompt": ["a"] * 64}).to_parquet(str(tmp_path / "train.parquet"))
    code, shown = dry_run("--config", DEMO, "--dataset_name", str(tmp_path), *plain)
    assert code == 1
    assert "PROBLEM: StdlibSearchEnv.reset" in shown
    assert "answers is None" in shown


def test_packages_that_are_missing_are_named(dry_run, monkeypatch):
    """Whatever is installed: none of them is found."""
    found = importlib.util.find_spec
    hidden = ("flash_attn", "kernels", "liger_kernel", "wandb", "vllm", "bitsandbytes", "deepspeed")

    def find(name, *rest):
        return None if name in hidden else found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(packages, "find_spec", find)
    flags = "--attn_implementation flash_attention_2 --use_liger_kernel true --report_to wandb"
    flags += " --use_vllm true --optim paged_adamw_8bit"
    path = LAUNCHES / "zero2.yaml"
    launch = ("--dry_run_accelerate_config", str(path))
    code, shown = dry_run("--config", DEMO, *flags.split(), *launch)
    assert code == 1
    assert "PROBLEM: WandbCallback requires wandb to be installed" in shown
    for said in ("flash_attn or kernels", "liger_kernel", "vllm"):
        assert re.search(f"PROBLEM: `.*` needs the package {said}, which is not installed", shown)
    assert "PROBLEM: bitsandbytes is not installed, and `optim='paged_adamw_8bit'`" in shown
    assert "note: `distributed_type=DEEPSPEED` needs the package deepspeed" in shown


def test_a_checkpoint_that_a_killed_run_left_unpublished_counts(dry_run, tmp_path):
    staged = tmp_path / files.STAGING / "checkpoint-4"
    staged.mkdir(parents=True)
    flags = ("--output_dir", str(tmp_path), "--resume_from_checkpoint", "true")
    assert dry_run("--config", DEMO, *flags)[0] == 1
    about = {"global_step": 4, "resumable": True, "inside_rollout": False}
    files.seal(staged, {**about, "identity": {}, "cut": {}, "settings": {}})
    assert dry_run("--config", DEMO, *flags)[0] == 0
    assert staged.exists(), "nothing is changed"


def test_streams_are_read(dry_run, tmp_path):
    flags = ("--dataset_streaming", "true", "--dataset_name", small_data(tmp_path / "data"))
    code, shown = dry_run("--config", DEMO, *flags)
    assert code == 0, shown
    assert "here, as a stream" in shown
    (tmp_path / "endless.yaml").write_text(re.sub("total_episodes.*", "", Path(DEMO).read_text()))
    code, shown = dry_run("--config", str(tmp_path / "endless.yaml"), *flags)
    assert code == 1
    assert "`dataset_streaming=True` leaves the length" in shown
