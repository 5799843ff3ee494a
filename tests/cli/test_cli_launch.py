"""Accelerate starts the processes: its flags are refused with its command line, which works."""

import re
import shlex
import subprocess
import sys

import pytest

from tests.kit.launch import ENVIRONMENT
from tests.kit.script_kit import AGENT, DEMO, LAUNCHES, ROOT
from trl_stppo.cli import agents
from trl_stppo.cli.flags import EvaluateArguments, TrainArguments
from trl_stppo.cli.usage import UsageError

ZERO = str(LAUNCHES / "zero2.yaml")


def printed_line(kind: type, words: list[str]) -> list[str]:
    """The words of the command line that the refusal of a launcher's settings prints."""
    with pytest.raises(UsageError) as refused:
        agents.parse_flags(kind, words)
    return shlex.split(re.search(r"^  (accelerate launch .*)$", str(refused.value), re.M)[1])


@pytest.mark.parametrize(("launch", "wanted"), [
    ("--num_processes 2", "--num_processes 2"),
    ("--mixed_precision=bf16 --multi_gpu", "--mixed_precision=bf16 --multi_gpu"),
    ("--accelerate_config zero2", f"--config_file {ZERO}"),
    ("--accelerate_config=zero2", f"--config_file {ZERO}"),
    ("--accelerate_config my/own.yaml", "--config_file my/own.yaml"),
])  # fmt: skip
@pytest.mark.parametrize("kind", [TrainArguments, EvaluateArguments])
def test_flags_of_the_launcher_are_refused_with_the_line_to_run(launch, wanted, kind):
    own = ["--max_turns", "2", "--config", DEMO, "--reward_funcs", "a:b", "c d:e"]
    command = "train" if kind is TrainArguments else "evaluate"
    found = printed_line(kind, [*own[:2], *launch.split(), *own[2:]])
    assert found == ["accelerate", "launch", *wanted.split(), "-m", "trl_stppo", command, *own]


def started(*words: str, folder=ROOT) -> subprocess.CompletedProcess[str]:
    """Two processes of the console script that `accelerate launch` has started."""
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--main_process_port", "0"]
    command = [sys.executable, *launch, "-m", "trl_stppo", "train", "--config", DEMO, *words]
    return subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=600
    )


@pytest.mark.slow
def test_two_processes_print_one_plan():
    done = started("--dry_run")
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"processes[ │]+2 ", done.stdout)
    assert done.stdout.count("What would run") == done.stdout.count("OK") == 1


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
