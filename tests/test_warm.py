"""Warm processes (`tests/kit/warm.py`) begin, speak and end as cold ones do, and leave nothing."""

import os
import signal
import subprocess
import sys

import pytest

from tests.kit import launch, warm
from tests.kit.isolation_kit import is_running
from tests.kit.waiting import PATIENCE, wait_until

PYTHON = sys.executable


def both(words, **options):
    """What the warm and what the cold process say and how they end."""
    cold = subprocess.run(
        [PYTHON, *words], capture_output=True, text=True, timeout=PATIENCE, **options
    )
    return warm.run([PYTHON, *words], timeout=PATIENCE, **options), cold


@pytest.mark.slow
@pytest.mark.parametrize("code", [
    "import sys; print(sys.stdin.read()); sys.exit(3)",
    "raise SystemExit('refused')",
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "import atexit; atexit.register(print, 'last'); print('first')",
    "import os, sys; print(os.getcwd(), os.environ['WORD'], 'OTHER' in os.environ, sys.argv, __name__)",
    "import os, threading; print(len(os.listdir('/proc/self/task')), threading.active_count())",
])  # fmt: skip
def test_a_warm_process_is_as_a_cold_one(code, tmp_path, monkeypatch):
    monkeypatch.setenv("OTHER", "1")
    env = {
        **{k: v for k, v in os.environ.items() if k != "OTHER"},
        "WORD": "said",
    }
    one, other = both(["-c", code, "a b"], cwd=tmp_path, env=env, input="line\n")
    assert (one.returncode, one.stdout, one.stderr) == (
        other.returncode,
        other.stdout,
        other.stderr,
    )


def test_what_hangs_is_ended_with_all_that_it_has_started(monkeypatch):
    monkeypatch.setattr(warm, "_parents", [warm._Parent(modules=())])
    code = "import os, time; os.write(1, f'{os.fork()}\\n'.encode()); time.sleep(1000)"
    words = [PYTHON, "-c", code]
    process = warm.Process(words, stdout=subprocess.PIPE, text=True)
    pids = {int(process.stdout.readline()), int(process.stdout.readline()), process.pid} - {0}
    assert len(pids) == 2
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    warm.end()
    assert wait_until(lambda: not any(map(is_running, pids)))
    assert process.communicate() == ("", None)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.long
def test_a_launchers_signal_to_all_its_children_is_not_for_the_parent():
    child = warm.Process([PYTHON, "-c", "import time; time.sleep(1000)"])
    os.kill(warm.parent().process.pid, signal.SIGTERM)
    assert warm.run([PYTHON, "-c", ""]).returncode == 0
    child.terminate()
    assert child.wait() == -signal.SIGTERM


RANKS = """
import os, sys, time, torch
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
told = torch.full((1,), rank + 1)
torch.distributed.all_reduce(told)
torch.save(int(told), f"{sys.argv[1]}/rank{rank}.pt")
if sys.argv[2] == "fails" and rank == 1:
    sys.exit("rank 1 fails")
if sys.argv[2] != "ends":
    time.sleep(1000)
"""


@pytest.mark.slow
def test_two_processes_find_each_other_and_none_outlives_the_other(tmp_path, monkeypatch):
    (tmp_path / "ranks.py").write_text(RANKS)
    monkeypatch.setattr(launch, "ROOT", tmp_path)
    assert launch.on_two_processes("ranks", tmp_path, "ends") == [3, 3]
    with pytest.raises(AssertionError, match="rank 1 fails"):
        launch.on_two_processes("ranks", tmp_path, "fails")
    with pytest.raises(AssertionError, match=r"\[-9, -9\]"):
        launch.on_two_processes("ranks", tmp_path, "hangs", timeout=3)
