"""One run at a time in a folder: the second is told who has it, and a crash leaves nothing to wait for."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from transformers import TrainerCallback

from tests.kit import warm
from tests.kit.builders import build, prompts
from tests.kit.isolation_kit import is_running
from tests.kit.launch import ENVIRONMENT, ROOT
from tests.kit.scripted import scripted_trainer
from tests.kit.signals_run import RUN
from tests.kit.waiting import wait_until
from trl_stppo.errors import RunLockError
from trl_stppo.trainer.disk import LOCK, RunLock


@pytest.fixture
def processes():
    """Starts processes, and ends what is left of them."""
    started = []

    def start(*arguments):
        process = warm.Process(
            [sys.executable, *arguments], cwd=ROOT, env={**os.environ, **ENVIRONMENT},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def seconds_to_take(folder) -> float:
    lock, start = RunLock(folder), time.monotonic()
    lock.take()
    lock.release()
    return time.monotonic() - start


def until(process, line: str) -> None:
    for said in process.stdout:
        if said.startswith(line):
            return
    raise AssertionError(process.communicate()[1][-3000:])


@pytest.mark.long
def test_two_runs_and_a_killed_one(processes, tmp_path):
    """Real trainings: the second is refused, changes nothing, and starts at once after a kill."""
    first = processes("-m", "tests.kit.signals_run", str(tmp_path))
    until(first, "BEGIN 2")
    first.send_signal(signal.SIGSTOP)
    files = sorted(tmp_path.rglob("*"))
    second, _ = scripted_trainer(tmp_path, **RUN)
    with pytest.raises(RunLockError) as refused:
        second.train(resume_from_checkpoint="auto")
    for said in (str(tmp_path), f"host {socket.gethostname()}", f"process {first.pid}"):
        assert said in str(refused.value)
    assert sorted(tmp_path.rglob("*")) == files

    first.kill()
    # It is dead, and its number still taken.
    assert wait_until(lambda: not is_running(first.pid))
    assert os.path.exists(f"/proc/{first.pid}")
    assert (tmp_path / LOCK).exists()
    assert seconds_to_take(tmp_path) < 1.0
    second.train(resume_from_checkpoint="auto")
    assert second.state.global_step == 7


def test_what_a_crash_has_left_is_taken_over(tmp_path):
    """Whichever process has its number now."""
    (tmp_path / LOCK).write_text("host here, process 1")
    assert seconds_to_take(tmp_path) < 1.0
    assert list(tmp_path.iterdir()) == []


class Looks(TrainerCallback):
    """Notes whether the folder is locked at each step, and may do something in the second one."""

    def __init__(self, folder, then=None) -> None:
        self._folder, self._then, self.seen = folder, then, []

    def on_step_begin(self, args, state, control, **kwargs):
        self.seen.append((self._folder / LOCK).exists())
        if self._then is not None and state.global_step == 1:
            self._then()


def fail() -> None:
    raise ZeroDivisionError


@pytest.mark.long
def test_it_is_given_back_however_the_run_ends(tmp_path):
    looks = Looks(tmp_path)
    trainer = build(tmp_path, arguments={"eval_dataset": prompts(2), "callbacks": [looks]})
    trainer.evaluate()
    for _ in range(2):
        trainer.train()
        assert not (tmp_path / LOCK).exists()
    trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 1
    trainer.train()
    assert looks.seen == [True] * 6
    trainer.add_callback(Looks(tmp_path, then=fail))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert not (tmp_path / LOCK).exists()
    with pytest.raises(ValueError, match="holds no checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    assert not (tmp_path / LOCK).exists()


@pytest.mark.long
def test_another_trainer_of_the_same_process_is_refused_too(tmp_path):
    second = build(tmp_path)

    def begin() -> None:
        with pytest.raises(RunLockError, match=f"process {os.getpid()}"):
            second.train()

    first = build(tmp_path, arguments={"callbacks": [Looks(tmp_path, then=begin)]})
    first.train()
    assert first.state.global_step == 2
