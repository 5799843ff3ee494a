"""Accelerate starts the processes of the console script."""

import subprocess
import sys

import pytest

from tests.kit.launch import ENVIRONMENT
from tests.kit.script_kit import AGENT, DEMO, ROOT


def started(*words: str, folder=ROOT) -> subprocess.CompletedProcess[str]:
    """Two processes of the console script that `accelerate launch` has started."""
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--main_process_port", "0"]
    command = [sys.executable, *launch, "-m", "trl_stppo", "train", "--config", DEMO, *words]
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
def test_two_processes_train(tmp_path):
    words = (
        "--per_device_train_batch_size 4 --total_episodes 64 --eval_episodes 0 --num_ppo_epochs 1"
    )
    done = started(
        *words.split(),
        "--output_dir",
        str(tmp_path),
        "--model_name_or_path",
        AGENT,
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "model.safetensors").exists()
