"""Asynchronous environments share one event loop; what blocks it costs nobody else."""

import asyncio
import threading
import time
from functools import partial

import pytest

from tests.kit import tiers
from tests.kit.episodes import ScriptedEnv, done
from tests.kit.rollout_kit import build, collect, environment_threads, play
from tests.kit.waiting import wait_until


async def quick():
    await asyncio.sleep(0.01)
    return "quick"


class Held(ScriptedEnv):
    """Blocks the loop as the row says: for good, or for some time, in itself or in a task of its own."""

    release = threading.Event()

    async def reset(self, blocks=0.0, in_a_task=False, waits=0.0, **row):
        self.blocks, self.in_a_task, self.waits = blocks, in_a_task, waits
        return ""

    async def step(self, action):
        if self.waits:
            await asyncio.sleep(self.waits)
        if self.in_a_task:
            await asyncio.gather(self.block(), asyncio.sleep(0))
        else:
            await self.block()
        return done()

    async def block(self):
        if self.blocks:
            Held.release.wait(self.blocks)


@pytest.fixture
def held():
    Held.release.clear()
    yield lambda **options: build(lambda: Held(done()), **options)
    Held.release.set()


@pytest.mark.parametrize(
    ("first", "in_a_task"), tiers.quick([(0, False), (3, True), (7, False)], (3, True))
)
def test_an_environment_that_blocks_the_loop_for_good_costs_its_own_episode(held, first, in_a_task):
    engine = held(env_timeout_seconds=0.8)
    rows = [{} for _ in range(8)]
    rows[first] = {"blocks": 60.0, "in_a_task": in_a_task}
    for _ in range(1 + in_a_task):  # instances that are made, and such as exist
        played = play(engine, lambda row, turn: "a]", rows)
        expected = ["terminated"] * 8
        expected[first] = "env_timeout"
        assert played.reasons == expected
        error = str(played.record.errors[first])
        start = (
            "Held: no answer in 0.8 s (`env_timeout_seconds`); it blocks the event loop that async"
        )
        assert error.startswith(start)


def test_who_has_begun_to_wait_goes_on_when_the_loop_is_free_again(held):
    """The block takes longer than the limit; of the others' time it takes nothing."""
    engine = held(env_timeout_seconds=1.0)
    rows = [{"waits": 0.1}, {"waits": 0.05, "blocks": 1.7}, {"waits": 0.4}, {"waits": 0.2}]
    played = play(engine, lambda row, turn: "a]", rows)
    assert played.reasons == ["terminated", "env_timeout", "terminated", "terminated"]


def test_many_that_block_for_a_while_each_have_their_own_limit(held):
    engine = held(env_timeout_seconds=1.0)
    played = play(engine, lambda row, turn: "a]", [{"blocks": 0.4}] * 6)  # 2.4 s in all
    assert played.reasons == ["terminated"] * 6


def test_nobody_waits_for_ever_behind_a_block(calls):
    release = threading.Event()

    async def waiting():
        await asyncio.sleep(0.1)

    async def blocking():
        release.wait(60)

    started = time.monotonic()
    calls.submit(1, waiting, 0.4)
    time.sleep(0.05)
    calls.submit(2, blocking, 0.4)
    results = collect(calls, 2)
    assert results[1].timed_out
    assert results[2].timed_out
    assert [results[key].blocked for key in (1, 2)] == ["another", "itself"]
    assert time.monotonic() - started < 6
    calls.submit(3, quick, 0.4)
    assert collect(calls, 1)[3].value == "quick"
    release.set()


def test_who_takes_too_long_is_overdue_among_many_that_are_busy(calls):
    """Short turns of others on the loop do not count as waiting for it."""
    over = threading.Event()

    async def busy():
        while not over.is_set():
            time.sleep(0.005)
            await asyncio.sleep(0)

    async def hanging():
        await asyncio.sleep(60)

    for key in range(3):
        calls.submit(key, busy, None)
    calls.submit(9, hanging, 0.3)
    result = collect(calls, 1)[9]
    over.set()
    assert (result.timed_out, result.blocked) == (True, None)
    assert result.seconds < 2.0


@pytest.mark.parametrize("thread", [False, True])
def test_what_has_not_begun_moves_to_the_new_loop_and_runs_once(calls, thread):
    release, ran = threading.Event(), []

    async def blocking():
        release.wait(60)

    async def counted(key):
        ran.append(key)
        return await quick()

    calls.submit(0, blocking, 0.3)
    for key in range(1, 4):
        in_a_thread = lambda key=key: calls.run_async(counted(key))  # noqa: E731
        calls.submit(key, in_a_thread if thread else partial(counted, key), 0.5)
    results = collect(calls, 4)
    assert [results[key].timed_out for key in range(4)] == [True, False, False, False]
    release.set()
    calls.close()
    assert wait_until(lambda: not environment_threads())
    assert sorted(ran) == [1, 2, 3]


def test_cancelling_the_call_that_blocks_frees_the_others(calls):
    release = threading.Event()

    async def blocking():
        release.wait(60)

    calls.submit(1, blocking, None)
    time.sleep(0.3)
    calls.submit(2, quick, None)
    assert calls.poll(0.2) == []
    calls.cancel(1)
    assert collect(calls, 1)[2].value == "quick"
    release.set()
