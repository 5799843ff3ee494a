"""Threads that die while they start, as under a memory limit: the run ends, and does not wait for them."""

import threading

import pytest

from tests.kit.builders import LIMITS, TEXT, at_step, build
from trl_stppo import threads
from trl_stppo.errors import ThreadStartError
from trl_stppo.threads import DaemonThread
from trl_stppo.trainer.disk import LOCK, complaint


@pytest.fixture
def dying(monkeypatch):
    """Call it, and every thread dies before it runs."""
    monkeypatch.setattr(threads, "START_SECONDS", 0.2)
    yield lambda: monkeypatch.setattr(threading.Thread, "_bootstrap", lambda self: None)
    threading._limbo.clear()


def test_a_thread_that_dies_as_it_starts_is_an_error(dying):
    ran = []
    thread = DaemonThread(ran.append, "good", 1)
    thread.start()
    thread.join()
    assert ran == [1]
    assert thread.daemon
    dying()
    with pytest.raises(ThreadStartError, match="bad"):
        DaemonThread(ran.append, "bad", 2).start()
    assert ran == [1]


def test_no_thread_at_all_is_the_same_error(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("can't start new thread")

    name = next(n for n in ("_start_joinable_thread", "_start_new_thread") if hasattr(threading, n))
    monkeypatch.setattr(threading, name, refuse)
    with pytest.raises(ThreadStartError, match="ulimit"):
        DaemonThread(print, "bad").start()


@pytest.mark.long
def test_a_rollout_whose_threads_do_not_start_ends_the_run_and_frees_its_folder(dying, tmp_path):
    callback = at_step("on_step_begin", 2, dying)
    limits = {**LIMITS, "num_mini_batches": 1}
    trainer = build(tmp_path, arguments={**TEXT, "callbacks": [callback]}, **limits, max_steps=4)
    engine = trainer._player.engine
    trainer.add_callback(at_step("on_step_begin", 2, engine.calls.rest))
    engine.calls._next_call = leave_at_once(engine.calls)
    with pytest.raises(ThreadStartError, match="environment"):
        trainer.train()
    assert not (tmp_path / LOCK).exists()


def leave_at_once(calls):
    """A worker's next call, or None without a moment of waiting."""
    whole = calls._next_call

    def next_call():
        calls._resting = True
        return whole()

    return next_call


def test_a_checkpoint_starts_no_thread(dying, tmp_path):
    trainer = build(tmp_path, save_strategy="steps", save_steps=2)
    trainer.add_callback(at_step("on_step_end", 2, dying))
    trainer.train()
    assert complaint(tmp_path / "checkpoint-2") is None
