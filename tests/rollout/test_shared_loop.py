"""Asynchronous environments share one event loop; a coroutine that blocks it does not end the run."""

import asyncio
import contextlib
import sys
import threading
import time

import pytest

from tests.kit.episodes import ScriptedEnv, done
from tests.kit.rollout_kit import build, collect, environment_threads, play
from tests.kit.waiting import PATIENCE, wait_until


async def quick():
    await asyncio.sleep(0.01)
    return "quick"


class Held(ScriptedEnv):
    """Blocks the loop for good where the row says so, in `reset` or in `step`."""

    release = threading.Event()

    async def reset(self, blocks=None, **row):
        self.blocks = blocks
        self.block("reset")
        return ""

    async def step(self, action):
        self.block("step")
        return done()

    def block(self, place):
        if self.blocks == place:
            Held.release.wait(PATIENCE)


@pytest.fixture
def released():
    Held.release.clear()
    yield Held.release
    Held.release.set()


@pytest.mark.long
@pytest.mark.parametrize("place", ["reset", "step"])
def test_an_environment_that_blocks_the_loop_for_good_ends_at_its_limit(released, place):
    engine = build(lambda: Held(done()), env_timeout_seconds=1.5)
    # Instances are made in the first rollout, and exist in the second.
    for _ in range(2):
        rows = [{}, {"blocks": place}, {}, {}]
        started = time.monotonic()
        played = play(engine, lambda row, turn: "a]", rows)
        assert time.monotonic() - started < PATIENCE / 2
        assert played.reasons[1] == "env_timeout"
        assert set(played.reasons) <= {"env_timeout", "terminated"}
        error = "Held: no answer in 1.5 s (`env_timeout_seconds`)"
        assert played.record.errors[1] == error
        # The next rollout has a loop that is free.
        assert play(engine, lambda row, turn: "a]", [{}] * 4).reasons == ["terminated"] * 4


@pytest.mark.long
@pytest.mark.parametrize("thread", [False, True])
def test_calls_on_a_blocked_loop_end_at_their_limits_and_later_calls_get_a_new_loop(calls, thread, released):
    async def waiting():
        await asyncio.sleep(0.1)

    async def blocking():
        released.wait(PATIENCE)

    started = time.monotonic()
    calls.submit(1, waiting, 0.4)
    time.sleep(0.05)
    calls.submit(2, (lambda: calls.run_async(blocking())) if thread else blocking, 0.4)
    calls.submit(3, quick, 0.4)
    results = collect(calls, 3)
    assert results[2].timed_out
    assert time.monotonic() - started < PATIENCE / 2
    calls.submit(4, quick, PATIENCE)
    assert collect(calls, 1)[4].value == "quick"
    released.set()
    calls.close()
    assert wait_until(lambda: not environment_threads())


def test_a_coroutine_that_ignores_its_cancellation_is_abandoned_and_the_loop_stays(calls):
    over = asyncio.Event()

    async def stubborn():
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    async def loop():
        return id(asyncio.get_running_loop())

    calls.submit(0, loop, None)
    before = collect(calls, 1)[0].value
    calls.submit(1, stubborn, 0.2)
    assert collect(calls, 1)[1].timed_out
    calls.submit(2, loop, None)
    assert collect(calls, 1)[2].value == before
    over.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_a_task_of_an_environment_ends_is_replaced(calls):
    async def ending():
        asyncio.get_running_loop().call_soon(sys.exit)
        await asyncio.sleep(PATIENCE)

    calls.submit(1, ending, 0.2)
    assert collect(calls, 1)[1].timed_out
    calls.submit(2, quick, PATIENCE)
    assert collect(calls, 1)[2].value == "quick"
