"""Killed with SIGKILL again and again, in every phase, and resumed: the run ends as if nothing had been."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch

from tests.kit.kill_run import PHASES, SETTINGS, STEPS, PhaseFile
from tests.kit.launch import ENVIRONMENT, ROOT, launcher
from tests.kit.run_log import comparable
from trl_stppo.trainer.disk import checkpoints, complaint

TARGETS = PHASES[1:-1]
LIMIT_SECONDS = 300


def start(folder: Path, kind: str, processes: int) -> subprocess.Popen:
    """One run, on one process or several."""
    launch = launcher(processes) if processes > 1 else []
    with open(folder / "output.txt", "ab") as output:
        return subprocess.Popen(
            [sys.executable, *launch, "-m", "tests.kit.kill_run", str(folder), kind], cwd=ROOT,
            env={**os.environ, **ENVIRONMENT}, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip


def finish(process: subprocess.Popen, folder: Path) -> None:
    assert process.wait(timeout=LIMIT_SECONDS) == 0, (folder / "output.txt").read_text()[-3000:]


def kill_in(process: subprocess.Popen, folder: Path, phase: str, draw: random.Random) -> str:
    """Wait until the run has been in a phase a few times, then kill it there. Says where it was."""
    marks = PhaseFile(folder / "phase")
    started = folder / "started"
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (started.exists() and started.read_text()):
        assert process.poll() is None, (folder / "output.txt").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    runner = psutil.Process(int(started.read_text()))
    visits, inside = draw.randint(1, 3), False
    while process.poll() is None and time.monotonic() < deadline:
        now = marks.get() == phase
        visits -= now and not inside
        inside = now
        if visits <= 0 and inside:
            if phase != "optimizer":
                time.sleep(draw.uniform(0.0, 0.01))
            with contextlib.suppress(psutil.NoSuchProcess):
                runner.suspend()
                if marks.get() == phase:
                    break
                runner.resume()
        time.sleep(0.0002)
    where = marks.get()
    # Workers of torchrun live in sessions of their own.
    if process.poll() is None:
        launcher = psutil.Process(process.pid)
        for victim in [*launcher.children(recursive=True), launcher]:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
    process.wait()
    started.unlink()
    return where


def kill_repeatedly(folder: Path, kind: str, processes: int, kills: int) -> Counter[str]:
    """Kill a run so many times, then let it end."""
    draw, where = random.Random(0), Counter[str]()
    for number in range(kills):
        process = start(folder, kind, processes)
        place = kill_in(process, folder, TARGETS[number % len(TARGETS)], draw)
        where[place] += 1
        broken = [c for f in checkpoints(folder / "run") if (c := complaint(f)) is not None]
        assert not broken, f"after a kill in {place}"
        if place == "finished":
            break
    finish(start(folder, kind, processes), folder)
    return where


@pytest.fixture(scope="module", params=["shared", "separate"])
def reference(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    finish(start(folder, request.param, 1), folder)
    return request.param, folder


def assert_same_end(folder: Path, reference: Path) -> None:
    mine, theirs = (torch.load(f / "weights.pt") for f in (folder, reference))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    logs = [comparable(json.loads((f / "log.json").read_text())) for f in (folder, reference)]
    assert logs[0] == logs[1]
    steps = [entry["step"] for entry in logs[0] if "loss" in entry]
    every = SETTINGS["logging_steps"]
    assert steps == list(range(every, STEPS + 1, every)), "no line twice, none missing"


@pytest.mark.slow
def test_fifty_kills(reference, tmp_path):
    kind, folder = reference
    where = kill_repeatedly(tmp_path, kind, 1, 25)
    print(f"\n{kind}: killed in {dict(where)}")
    assert_same_end(tmp_path, folder)
    assert sum(where.values()) == 25
    assert set(TARGETS) <= set(where), "every phase was hit"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["overlapped", "agent"])
def test_kills_with_a_rollout_under_way_and_with_an_agent(tmp_path, kind):
    for name, kills in (("reference", 0), ("killed", 20)):
        (tmp_path / name).mkdir()
        where = kill_repeatedly(tmp_path / name, kind, 1, kills)
    print(f"\n{kind}: killed in {dict(where)}")
    assert_same_end(tmp_path / "killed", tmp_path / "reference")


@pytest.mark.slow
def test_kills_of_two_processes(tmp_path):
    ends = []
    for name, kills in (("reference", 0), ("killed", 8)):
        folder = tmp_path / name
        folder.mkdir()
        ends.append(folder)
        where = kill_repeatedly(folder, "shared", 2, kills)
        print(f"\n{name}: killed in {dict(where)}")
    assert_same_end(ends[1], ends[0])
