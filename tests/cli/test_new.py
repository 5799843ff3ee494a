"""`trl-stppo new`: a folder that runs at once, and that the tutorial shows."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.kit.docs_kit import DOCS
from tests.kit.fakes import char_tokenizer, tiny_policy
from trl_stppo.cli.evaluation_tables import figures_of
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
    *_, line = run.stderr.decode().splitlines()
    assert line.startswith("Run `python warm_start.py` first")


def test_an_interrupted_script_ends_without_a_traceback(tmp_path, monkeypatch):
    class Interrupted:
        def __init__(self, **arguments):
            pass

        def evaluate(self):
            raise KeyboardInterrupt

    assert main(["new", str(tmp_path / "mine"), "--model", "any"]) == 0
    taught = tmp_path / "mine" / "runs" / "careless"
    taught.mkdir(parents=True)
    (taught / "players.txt").write_text("players")
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.syspath_prepend(tmp_path / "mine")
    monkeypatch.delitem(sys.modules, "environment", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr("trl_stppo.STPPOTrainer", Interrupted)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path("train.py")
    sys.modules.pop("environment", None)
    assert isinstance(ended.value.code, str)
    assert ended.value.__suppress_context__


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
    train = (tmp_path / "theirs" / "train.py").read_text()
    assert "run.yaml" in train
    assert "STPPOConfig(" not in train, "every setting has one place"


@pytest.mark.long
def test_script_and_command_make_the_same_run(tmp_path, monkeypatch, capsys):
    """Weight for weight; and `evaluate` plays the episodes of the script's evaluation."""
    tokenizer, folder = char_tokenizer(), tmp_path / "theirs"
    assert main(["new", str(folder), "--model", "anyone/anything"]) == 0
    tiny_policy(tokenizer).save_pretrained(folder / "runs/careless")
    tokenizer.save_pretrained(folder / "runs/careless")
    (folder / "runs/careless/players.txt").write_text("the careless player 0.50")
    game = folder / "environment.py"
    game.write_text(game.read_text().replace("0.0, False", "len(word) / 7, False"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "environment", raising=False)
    few = ["--total_episodes", "96", "--max_completion_length", "60", "--use_cpu", "true"]
    monkeypatch.setattr(sys, "argv", ["train.py", *few, "--output_dir", "runs/script"])
    scope = {}
    exec((folder / "train.py").read_text(), scope)
    words = ["--config", "run.yaml", *few]
    assert main(["train", *words, "--output_dir", "runs/command"]) == 0
    one, other = (
        load_file(folder / "runs" / name / "adapter_model.safetensors") for name in ("script", "command")
    )
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())
    assert any(weight.any() for name, weight in one.items() if "lora_B" in name)
    assert main(["evaluate", *words, "--output", "a.json"]) == 0
    (found,) = json.loads(Path("a.json").read_text())["results"]["careless"].values()
    figures = figures_of(scope["before"], prefix="eval_")
    assert {name: found[name] for name in figures} == figures
    sys.modules.pop("environment", None)
