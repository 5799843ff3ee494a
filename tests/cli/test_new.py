"""`trl-stppo new`: a folder that runs at once, and that the tutorial shows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.docs_kit import DOCS
from trl_stppo.cli.main import main


@pytest.fixture
def folder(tmp_path, capsys):
    assert main(["new", str(tmp_path / "mine")]) == 0
    return tmp_path / "mine"


def test_a_folder_that_exists_is_left_alone(folder, capsys):
    (folder / "train.py").write_text("mine")
    assert main(["new", str(folder)]) == 1
    assert "FOLDER" in capsys.readouterr().err
    assert (folder / "train.py").read_text() == "mine"


def test_the_tutorial_shows_the_files(folder):
    """Word for word, so that what readers see is what they run."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "tutorial.md").read_text(), re.S)
    for name in ("environment.py", "warm_start.py", "train.py"):
        assert f"# {name}\n" + (folder / name).read_text() in blocks, name


@pytest.mark.long
def test_training_before_the_warm_start_says_what_to_run_first(folder):
    run = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, timeout=600)
    assert run.returncode == 1
    (line,) = run.stderr.decode().splitlines()
    assert line.startswith("Run `python warm_start.py` first")


def test_a_pretrained_model_gets_files_of_its_own(tmp_path, folder, capsys):
    (tmp_path / "smol").mkdir()
    assert main(["new", str(tmp_path / "theirs"), "--model", str(tmp_path / "smol")]) == 0
    names = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert names == {path.name for path in folder.iterdir()} - {"rows.jsonl"} | {"rows"}
    assert {path.name for path in (tmp_path / "theirs/rows").iterdir()} == {
        "train.jsonl",
        "test.jsonl",
    }
    said = (tmp_path / "theirs" / "warm_start.py").read_text()
    assert f"MODEL = {str(tmp_path / 'smol')!r}" in said
    compile(said, "warm_start.py", "exec")
    assert "LoraConfig" in (tmp_path / "theirs" / "train.py").read_text()


def test_the_settings_for_a_pretrained_model_would_start(tmp_path, dry_run, monkeypatch):
    assert main(["new", str(tmp_path / "theirs"), "--model", "anyone/anything"]) == 0
    monkeypatch.chdir(tmp_path / "theirs")
    monkeypatch.syspath_prepend(str(tmp_path / "theirs"))
    # The warm start makes this folder.
    Path("runs/careless").mkdir(parents=True)
    code, shown = dry_run("--config", "run.yaml")
    assert (code, "PROBLEM" in shown) == (0, False), shown
    assert "LoRA of rank" in shown


@pytest.mark.slow
def test_it_trains_as_a_script_and_by_the_command(folder):
    def run(*words):
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=folder, check=True, timeout=600, stdout=subprocess.PIPE)

    lines = run("warm_start.py").stdout.decode().splitlines()
    assert [line.split(",")[0] for line in lines[:3]] == [f"step {n} of 300" for n in (0, 100, 200)]
    assert lines[3].startswith("turns have up to 2 tokens")
    script = (folder / "train.py").read_text().replace("10_240", "256")
    (folder / "train.py").write_text(script)
    run("train.py")
    assert (folder / "runs/agent/agent.json").is_file()
    few = ["--total_episodes", "128", "--output_dir", "runs/command"]
    run("-m", "trl_stppo", "train", "--config", "run.yaml", *few)
    assert (folder / "runs/command/model.safetensors").is_file()
