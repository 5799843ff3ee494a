"""Calls into environments: results, time limits, and threads that come and go."""

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest

from tests.kit.rollout_kit import collect
from tests.kit.waiting import PATIENCE, wait_until


def test_coroutine_functions_run_together_on_one_loop(calls):
    loops, entered = set(), []

    async def wait():
        loops.add(id(asyncio.get_running_loop()))
        entered.append(1)
        while len(entered) < 50:
            await asyncio.sleep(0.01)
        return "done"

    for key in range(50):
        calls.submit(key, wait, PATIENCE)
    assert all(r.value == "done" for r in collect(calls, 50).values())
    assert len(loops) == 1


ERRORS = [ValueError("no"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), TimeoutError()]


@pytest.mark.parametrize(
    ("error", "asynchronous"), [*((error, True) for error in ERRORS), (ERRORS[1], False)]
)
def test_whatever_a_call_raises_is_its_result(calls, error, asynchronous):
    def fail():
        raise error

    async def fail_async():
        raise error

    calls.submit(1, fail_async if asynchronous else fail, PATIENCE)
    result = collect(calls, 1)[1]
    assert result.error is error
    assert not result.timed_out
    calls.submit(2, lambda: "alive", PATIENCE)
    assert collect(calls, 1)[2].value == "alive"


def test_an_overdue_call_is_abandoned_and_its_thread_replaced(calls):
    release = threading.Event()
    for key in range(4):
        calls.submit(key, release.wait, 0.1)
    calls.submit(9, lambda: "next", PATIENCE)
    results = collect(calls, 5)
    assert all(results[key].timed_out for key in range(4))
    assert results[9].value == "next"
    release.set()
    time.sleep(0.05)
    assert calls.poll(0.05) == []


@pytest.mark.parametrize(("error", "asynchronous"), [(None, True), (ValueError("no"), True), (None, False)])
def test_an_overdue_call_that_ends_before_anybody_polls_is_overdue_all_the_same(calls, asynchronous, error):
    def answer():
        time.sleep(0.1)
        if error is not None:
            raise error
        return "late"

    async def answer_async():
        await asyncio.sleep(0.1)
        return answer()

    calls.submit(1, answer_async if asynchronous else answer, 0.05)
    assert wait_until(lambda: calls._finished)
    (result,) = calls.poll(0.0)
    assert (result.timed_out, result.value, result.error) == (True, None, None)


def test_a_cancelled_call_leaves_no_result(calls):
    release = threading.Event()
    for key in range(4):
        calls.submit(key, release.wait, None)
    assert wait_until(lambda: len(calls._running) == 4)
    calls.cancel(0)
    calls.submit(6, lambda: "new", None)
    assert collect(calls, 1)[6].value == "new"
    release.set()
    assert set(collect(calls, 3)) == {1, 2, 3}


def test_a_call_that_is_cancelled_just_after_its_end_leaves_no_result_either(calls):
    calls.submit(1, lambda: "too late", None)
    calls.submit(2, lambda: "in time", None)
    assert wait_until(lambda: len(calls._finished) == 2)
    calls.cancel(1)
    assert [result.key for result in calls.poll(0.0)] == [2]


def test_polling_does_not_spin_and_returns_as_soon_as_there_is_something(calls):
    started = time.monotonic()
    assert calls.poll(0.2) == []
    assert 0.15 < time.monotonic() - started < PATIENCE
    calls.submit(1, lambda: time.sleep(0.1), None)
    started = time.monotonic()
    assert len(calls.poll(1000.0)) == 1
    assert time.monotonic() - started < PATIENCE


def test_hanging_calls_do_not_block_the_interpreters_exit():
    script = """
        import asyncio, threading, time
        from trl_stppo.rollout.workers import EnvironmentCalls
        calls = EnvironmentCalls()
        calls.submit(1, lambda: time.sleep(600), 0.1)
        calls.submit(2, lambda: time.sleep(600), None)
        async def block():
            time.sleep(600)
        calls.submit(3, block, 0.1)
        while len(calls.poll(0.5)) == 0:
            pass
        print("out")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "out\n"


def test_an_idle_thread_keeps_no_environment_alive(calls):
    class Env:
        def step(self):
            return "done"

    env = Env()
    gone = weakref.ref(env)
    calls.submit(1, env.step, PATIENCE)
    assert collect(calls, 1)[1].value == "done"
    del env
    assert wait_until(lambda: gone() is None)
