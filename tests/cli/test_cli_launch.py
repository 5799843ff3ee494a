"""Which words are the launcher's, what it is told, and what becomes of its processes' ends."""

import os
import signal
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import accelerate.commands.launch
import pytest
import yaml
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.kit.script_kit import AGENT, DEMO, LAUNCHES, ROOT
from tests.kit.waiting import PATIENCE
from trl_stppo.cli import launch, train
from trl_stppo.cli.main import main

# Without these no training is started.
NEEDED = ("--model_name_or_path", "a", "--dataset_name", "b", "--reward_funcs", "c:d")


@pytest.fixture
def told(monkeypatch):
    """What accelerate's launcher is given instead of starting anything, by `main`'s words."""
    for name in launch.LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    seen = []
    monkeypatch.setattr(accelerate.commands.launch, "launch_command", seen.append)

    def run(*words: str):
        seen.clear()
        assert main(["train", *words, *(() if DEMO in words else NEEDED)]) == 0
        return seen[0] if seen else None

    return run


@pytest.fixture
def here(monkeypatch):
    """Words of trainings that run in this process."""
    seen = []
    monkeypatch.setattr(train, "run", lambda words: seen.append(words) or 0)
    return seen


def test_words_are_divided_as_trl_divides_them(told):
    arguments = told(
        *("--max_turns", "2", "--num_processes", "2", "--config", DEMO, "--mixed_precision=bf16"),
        *("--reward_funcs", "a:b", "c:d", "--multi_gpu", "--seed", "3"),
    )
    assert (arguments.num_processes, arguments.mixed_precision, arguments.multi_gpu) == (
        2,
        "bf16",
        True,
    )
    assert (arguments.module, arguments.training_script) == (True, "trl_stppo")
    own = ["--max_turns", "2", "--config", DEMO, "--reward_funcs", "a:b", "c:d", "--seed", "3"]
    assert arguments.training_script_args == ["train", *own]


def test_a_flag_that_both_have_is_the_commands(told):
    arguments = told("--gradient_accumulation_steps", "4", "--num_processes", "2")
    own = ["--gradient_accumulation_steps", "4"]
    assert arguments.training_script_args == ["train", *own, *NEEDED]


def test_a_file_may_speak_to_the_launcher(told, here, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("variant: ppo\naccelerate_config: zero2\nnum_processes: 4\nmulti_gpu: false\n")
    arguments = told("--config", str(path), "--num_processes", "3")
    assert arguments.num_processes == 3, "the command line's word"
    assert arguments.config_file == str(LAUNCHES / "zero2.yaml")
    assert not arguments.multi_gpu
    assert here == []


@pytest.mark.parametrize("name", ["zero3", "{mine}"])
def test_files_are_found_by_name_and_by_path(name, told, tmp_path):
    (tmp_path / "mine.yaml").write_text("num_processes: 1\n")
    path = told("--accelerate_config", name.format(mine=tmp_path / "mine.yaml")).config_file
    assert yaml.safe_load(Path(path).read_text())["num_processes"] >= 1
    assert ("trl_stppo" in path) == (name == "zero3")


def test_a_name_that_is_not_known_is_refused_with_those_that_are():
    for name in ("multigpu", "fsdp1"):
        assert name not in launch.shipped()
        with pytest.raises(ArgumentTypeError, match=f"`{name}`.*zero2"):
            launch.config_file(name)


def test_without_words_for_the_launcher_it_runs_here(told, here, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "accelerate.commands.config.config_args.default_config_file", str(tmp_path / "x")
    )
    assert told("--seed", "1") is None
    assert here == [["--seed", "1", *NEEDED]]
    (tmp_path / "x").write_text("num_processes: 2\n")
    assert told("--seed", "1").num_processes is None, "accelerate's own default file says more"


def test_a_process_of_a_launcher_runs_here(told, here, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert told("--seed", "1") is None
    assert here == [["--seed", "1", *NEEDED]]


def test_a_dry_run_is_not_launched_and_knows_the_launch(told, here, capsys):
    words = ("--accelerate_config", "zero2", "--num_processes", "4", "--dry_run")
    assert told("--config", DEMO, *words) is None
    assert here == []
    assert "4, ZeRO-2" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "engine", "processes"), [
    ("--num_processes 2", "DDP", 2),
    ("--use_deepspeed --zero_stage 3 --num_processes 2", "ZeRO-3", 2),
    ("--use_fsdp --fsdp_version 2", "FSDP2", 1),
    ("--config_file {zero2} --zero_stage 1", "ZeRO-1", 8),
    ("--config_file {fsdp2} --multi_gpu", "DDP", 8),
    ("--config_file {zero2} --use_fsdp --fsdp_version 2", "FSDP2", 8),
])  # fmt: skip
def test_launches_are_read_from_words_and_files(words, engine, processes):
    words = words.format(zero2=LAUNCHES / "zero2.yaml", fsdp2=LAUNCHES / "fsdp2.yaml").split()
    found = launch.planned_launch(words)
    assert (found.engine, found.processes) == (engine, processes)


def failed(status: int) -> ChildFailedError:
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=status, error_file="nowhere")
    return ChildFailedError("train", {0: failure})


@pytest.mark.parametrize(("error", "code"), [
    (subprocess.CalledProcessError(2, "x"), 2),
    (subprocess.CalledProcessError(-9, "x"), 137),
    (failed(143), 143),
    (failed(-15), 143),
    (SignalException("x", signal.SIGTERM), 143),
])  # fmt: skip
def test_the_end_of_a_process_is_the_exit_code(error, code, monkeypatch):
    def ends(arguments):
        raise error

    monkeypatch.setattr(accelerate.commands.launch, "launch_command", ends)
    assert launch.launched(["--num_processes", "2"], ["train"]) == code


CHILD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *given: sys.exit(5))
print("ready", flush=True)
time.sleep(600)
"""


def test_a_signal_reaches_the_process_that_is_waited_for():
    before = signal.getsignal(signal.SIGTERM)
    with launch.forwarded_signals():
        child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE)
        assert child.stdout.readline() == b"ready\n"
        os.kill(os.getpid(), signal.SIGINT)  # a terminal's reaches the child by itself
        os.kill(os.getpid(), signal.SIGTERM)
        assert child.wait(timeout=PATIENCE) == 5
    child.stdout.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_is_launched_runs_the_command_with_its_words(tmp_path):
    """The command line that accelerate makes, with a mistake that is found before anything is imported."""
    arguments = launch.launch_arguments(["--cpu", "--num_processes", "1"], ["train", "-h"])
    arguments = accelerate.commands.launch._validate_launch_command(arguments)[0]
    command, environment = prepare_simple_launcher_cmd_env(arguments)
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: trl-stppo train")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [["--cpu", "--num_processes", "1"], ["--multi_gpu", "--num_processes", "2"]]
)
def test_trainings_are_launched(kind, tmp_path):
    words = (
        "--per_device_train_batch_size 4 --total_episodes 64 --eval_episodes 0 --num_ppo_epochs 1"
    )
    words = ["--config", DEMO, *words.split(), *kind, "--output_dir", str(tmp_path)]
    command = [sys.executable, "-m", "trl_stppo", "train", *words, "--model_name_or_path", AGENT]

    def run(*more):
        return subprocess.run(
            [*command, *more], cwd=tmp_path, capture_output=True, text=True, timeout=600
        )

    done = run()
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "model.safetensors").exists()
    done = run("--environment", "SearchEnv")
    assert done.returncode == 2
    assert "must be module:name" in done.stderr
