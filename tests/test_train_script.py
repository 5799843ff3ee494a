"""The training script, run as a user runs it, on one small rollout batch per variant."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parent.parent
FLAGS = """
    --config scripts/configs/demo.yaml --per_device_train_batch_size 4 --total_episodes 16
    --num_ppo_epochs 2 --num_mini_batches 2 --eval_episodes 8 --per_device_eval_batch_size 8
    --logging_steps 1
"""


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/train_stppo.py", *FLAGS.split(), *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_demo_leaves_a_table_a_picture_a_log_and_a_model_that_loads(tmp_path):
    result = run("--output_dir", str(tmp_path))
    assert result.returncode == 0, result.stderr[-2000:]
    assert "before" in result.stdout
    assert "95 % interval" in result.stdout
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    log = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert any("clip_bias/norm" in entry for entry in log)
    assert sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tmp_path).parameters()) > 1e5
    assert (tmp_path / "critic" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["ppo", "turn-ppo", "s-ppo", "st-ppo"])
def test_every_variant_is_one_flag(tmp_path, variant):
    result = run("--output_dir", str(tmp_path), "--variant", variant, "--eval_episodes", "0")
    assert result.returncode == 0, result.stderr[-2000:]


def test_a_wrong_environment_path_says_how_to_write_it(tmp_path):
    result = run("--output_dir", str(tmp_path), "--environment", "SearchEnv")
    assert result.returncode != 0
    assert "module:name" in result.stderr
