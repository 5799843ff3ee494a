"""Calls and episodes that take too long, processes that die, and leaving in the middle."""

import asyncio
import threading
import time

import pytest

from tests.kit.episodes import ScriptedEnv, done, going
from tests.kit.isolated_envs import Dangerous, Echo
from tests.kit.isolation_kit import descendants
from tests.kit.rollout_kit import ScriptedBackend, build, environment_threads, play, says, shown
from tests.kit.waiting import PATIENCE, wait_until
from trl_stppo import isolated

FOREVER = 2 * PATIENCE


class Slow(ScriptedEnv):
    """Takes as long as the row says, at most until the test has ended; keeps a list of its instances."""

    made: list = []  # noqa: RUF012 - shared on purpose
    over = threading.Event()

    def __init__(self, *steps):
        super().__init__(*(steps or (going("x"), done())))
        Slow.made.append(self)

    def reset(self, in_reset=0.0, in_step=0.0, **row):
        self.in_step = in_step
        self.over.wait(in_reset)
        return ""

    def step(self, action):
        self.over.wait(self.in_step)
        return super().step(action)


class SlowAsync(Slow):
    async def reset(self, in_reset=0.0, **row):
        await asyncio.sleep(in_reset)
        return super().reset(**row)

    async def step(self, action):
        await asyncio.sleep(self.in_step)
        self.in_step = 0.0
        return super().step(action)


@pytest.fixture(autouse=True)
def _no_instances():
    Slow.made.clear()
    Slow.over.clear()
    yield
    Slow.over.set()


@pytest.mark.long
@pytest.mark.parametrize(("when", "turns", "kind"), [("in_reset", 0, Slow), ("in_step", 1, SlowAsync)])
def test_a_call_that_takes_too_long_ends_its_episode(kind, when, turns):
    engine = build(kind, env_timeout_seconds=0.5)
    for _ in range(2):
        started = time.monotonic()
        played = play(engine, lambda row, turn: "a]", [{when: FOREVER}, {}])
        assert time.monotonic() - started < PATIENCE
        assert played.reasons == ["env_timeout", "terminated"]
        assert played.record.errors == [
            f"{kind.__name__}: no answer in 0.5 s (`env_timeout_seconds`)",
            None,
        ]
        assert played.episodes[0].num_turns == turns
        assert played.record.terminated == [True, True]
    assert len(Slow.made) == 3


def test_an_instance_that_was_made_too_late_is_nobodys():
    proceed, made = threading.Event(), []

    def factory():
        number = len(made)
        env = ScriptedEnv(done())
        made.append(env)
        if number == 1:
            proceed.wait()
        return env

    engine = build(factory, env_timeout_seconds=0.5)
    engine.pool.discard(None, 0)
    assert play(engine, says([])).reasons == ["env_timeout"]
    played = play(engine, says(["a]"]))
    assert played.only.env is made[2]
    proceed.set()
    assert wait_until(lambda: made[1].rows != [])
    played = play(engine, says(["b]"]))
    assert played.only.env is made[2]
    assert (len(made), made[1].actions, made[2].actions) == (3, [], ["b"])


class Leaving(ScriptedBackend):
    """Raises once an environment is in its step while another episode has a turn to sample."""

    def __init__(self, error):
        super().__init__(lambda row, turn: "a]")
        self.error = error

    def step(self):
        if Held.entered.is_set():
            raise self.error
        return super().step()


class Held(Slow):
    """Its step lasts until the test lets it end, where the row says so."""

    entered, release = threading.Event(), threading.Event()

    def reset(self, held=False, **row):
        self.held = held
        return super().reset(**row)

    def step(self, action):
        if self.held:
            self.entered.set()
            self.release.wait(PATIENCE)
        else:
            self.entered.wait(PATIENCE)
        return super().step(action)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
def test_an_exception_while_sampling_leaves_nothing_behind(error):
    Held.entered.clear()
    Held.release.clear()
    engine = build(lambda: Held(going("x"), going("y"), done()))
    busy = Slow.made[0]
    backend = Leaving(error)
    with pytest.raises(type(error)):
        play(engine, backend, [{"held": True}, {}, {}])
    assert (backend.held, backend.busy) == ({}, False)
    assert engine.calls.poll(0.0) == []
    assert not engine.calls._running
    # The instance that was busy then may still be; it is not used again.
    played = play(engine, lambda row, turn: "a]", [{}] * 3)
    assert played.reasons == ["terminated"] * 3
    assert all(episode.env is not busy for episode in played.episodes)
    Held.release.set()
    engine.close()
    assert wait_until(lambda: not environment_threads())


@pytest.mark.long
def test_processes_that_hang_or_die_cost_only_their_episodes():
    others = descendants()
    engine = build(isolated(Dangerous), env_timeout_seconds=2.0)
    say = [["!do a;get b;later c]", "end]"], ["!do hang]"], ["!do exit]"]]
    say += [["!later exit;do b]"], ["!do leave]", "end]"], [], []]
    rows = [{}] * 5 + [{"doom": "hang"}, {"doom": "exit"}]
    pids = set()
    for _ in range(2):
        played = play(engine, says(*say), rows)
        ends = ["no_action", "env_timeout", "env_error", "env_error"]
        # In the fifth the process lives on, so it is an answer like any other.
        assert played.reasons == [*ends, "no_action", "env_timeout", "env_error"]
        assert shown(played.episodes[0]) == (
            "[u q ][a |!do a;get b;later c][t did a][t got b][t did c][a end]"
        )
        assert played.record.turn_rewards[0] == [1.0 + 0.5, 0.0]
        assert played.record.final_rewards == [1.0, None, None, None, 1.0, None, None]
        error = played.record.errors[2]
        assert error.startswith("EnvironmentDied: the process of Dangerous")
        assert "code 3" in error
        pids |= {played.episodes[0].env.pid}
    assert len(pids) == 1
    busy = len(descendants() - others)
    engine.close()
    # The server of forks stays, unless it was there before.
    assert wait_until(lambda: len(descendants() - others) <= 1)
    assert busy > 0
    assert wait_until(lambda: not environment_threads())


def test_a_text_environment_in_a_process_plays_as_in_a_thread():
    played = []
    for factory in (Echo, isolated(Echo)):
        engine = build(factory)
        rows = [{"letter": "x", "more": 1}, {}]
        result = play(engine, says(["a]", "stop]"], ["b]", "stop]"]), rows)
        played.append([(shown(e), e.env.seed, e.turn_rewards) for e in result.episodes])
        assert result.record.env_types == ["Echo", "Echo"]
    assert played[0] == played[1]
    assert played[0][0][0] == "[u qx][a |a][u ax][a stop]"
