"""The grid that is learned from screenshots: its pictures, and a short training."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "images"


def test_the_grid_shows_agent_and_goal(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from grid_env import GREEN, GREY, RED, Grid

    env = Grid()
    image, _ = env.reset(seed=3)
    places = {image.getpixel((8 * x + 4, 8 * y + 4)): (x, y) for x in range(3) for y in range(3)}
    assert (places[RED], places[GREEN]) == (env.agent, env.goal)
    blind, _ = Grid(blind=True).reset(seed=3)
    assert blind.getcolors() == [(576, GREY)]
    env.agent, env.goal = (0, 0), (1, 0)
    _, reward, terminated, truncated, info = env.step("r")
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)


@pytest.mark.long
def test_the_demo_trains(tmp_path):
    words = ["train_grid.py", "--rollouts", "1", "--output_dir", str(tmp_path)]
    done = subprocess.run([sys.executable, *words], cwd=SCRIPTS, capture_output=True, text=True, check=True)
    assert "seeing, seed 1: 0." in done.stdout
