"""The example scripts train; and they are Python that names what we have, without their packages."""

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "scripts" / "agents"
PACKAGES = {"openai_agents": "agents.tool", "langgraph_agent": "langgraph"}


def test_every_example_imports_only_what_is_there():
    """Its own package aside."""
    assert {path.stem for path in FOLDER.glob("*.py")} == {*PACKAGES, "taught", "scripted"}
    own = {"agents", "langchain_core", "langchain_openai", "langgraph", "taught"}
    for path in FOLDER.glob("*.py"):
        compile(path.read_text(), str(path), "exec")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] not in own:
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


@pytest.mark.agents
@pytest.mark.parametrize("name", PACKAGES)
def test_an_example_trains_and_saves(name, tmp_path):
    pytest.importorskip(PACKAGES[name])
    command = [sys.executable, str(FOLDER / f"{name}.py"), "--updates", "3"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*command, "--output_dir", str(tmp_path)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    scores = [line["episode/score"] for line in lines if "episode/score" in line]
    assert len(scores) == 3
    assert max(scores) > 0.1, "the policy has been taught to call the tool"
    assert (tmp_path / "model.safetensors").exists()
