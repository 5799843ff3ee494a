"""The script, run as a user runs it; what it writes is what `train_stppo.py` loads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import load_dataset

from tests.kit.hub_copies import flashrag

ROOT = Path(__file__).parents[3]


def run(tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/search/prepare_data.py", *flags]
    env = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    options = {"cwd": ROOT, "env": env, "timeout": 900, "check": False}
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.mark.long
def test_two_sets_become_a_dataset_with_two_splits(tmp_path, monkeypatch):
    flashrag(tmp_path, "nq", "train", [(f"question {i}", ["x"]) for i in range(5)])
    flashrag(tmp_path, "nq", "test", [("Question 3?", ["x"])])
    flashrag(tmp_path, "bamboogle", "test", [("which one", ["that"])])
    output = tmp_path / "data" / "search"
    flags = f"--train nq --eval nq bamboogle --local {tmp_path} --output {output}".split()
    result = run(tmp_path, *flags, "--max_train_rows", "3")
    assert result.returncode == 0, result.stderr[-2000:]
    assert f"rows: {output}" in result.stdout
    assert "train nq: 3 of 5 rows" in result.stdout
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = load_dataset(str(output))
    assert {name: len(split) for name, split in rows.items()} == {"train": 3, "test": 2}
    assert rows["test"]["dataset"] == ["nq", "bamboogle"]
    assert "question 3" not in rows["train"]["question"]
