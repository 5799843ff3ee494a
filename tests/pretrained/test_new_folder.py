"""`trl-stppo new --model`: its files run as they are, here for fewer games."""

import re
import subprocess
import sys

import pytest

from tests.pretrained.test_training import FOLDER
from trl_stppo.cli.main import main

pytestmark = [
    pytest.mark.pretrained,
    pytest.mark.skipif(not FOLDER.exists(), reason=f"{FOLDER} is made by `make pretrained`"),
]


def test_the_files_train_the_model(tmp_path):
    folder = tmp_path / "mine"
    assert main(["new", str(folder), "--model", str(FOLDER)]) == 0
    warm, few = folder / "warm_start.py", ["--total_episodes", "48", "--num_generations_eval", "1"]
    warm.write_text(warm.read_text().replace("GAMES = 64", "GAMES = 8"))
    for name, *flags in (["warm_start.py"], ["train.py", *few]):
        run = subprocess.run(
            [sys.executable, name, *flags], cwd=folder, timeout=1200, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
    lines = " ".join(re.findall("^success: .*", run.stdout, re.M))
    careless, chance, before, after = re.findall(r"\d\.\d\d", lines)
    assert float(careless) > float(chance) > 0.3, "a random guess wins 37 games in a hundred"
    assert 0 <= float(before) <= 1
    assert 0 <= float(after) <= 1
    assert (folder / "runs/agent/agent.json").is_file()
