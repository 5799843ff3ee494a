"""Who goes on when: places, slow environments, gathering, and independence of all that."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest

from tests.kit.episodes import ids
from tests.kit.rollout_kit import ScriptedBackend, build, play, shown
from tests.kit.tiers import quick
from tests.kit.waiting import PATIENCE
from trl_stppo.generation.protocol import TurnResult
from trl_stppo.rollout import engine as engine_module


def steady(row, turn):
    return f"{row}.{turn}]"


class Counting:
    """Takes the turns and the time that its row says, or waits for an event; opens with its number."""

    def reset(self, n=0, turns=2, pauses=(), **row):
        self.n, self.turns, self.count, self.pauses = n, turns, 0, list(pauses)
        self.pause()
        return f":{n}"

    def step(self, action):
        self.count += 1
        self.pause()
        return f"{action}!", self.count, self.count >= self.turns, False, {}

    def pause(self):
        pause = self.pauses.pop(0) if self.pauses else 0.0
        if isinstance(pause, threading.Event):
            pause.wait(PATIENCE)
        else:
            time.sleep(pause)


class CountingAsync(Counting):
    async def step(self, action):
        pause = self.pauses.pop(0) if self.pauses else 0.0
        if isinstance(pause, threading.Event):
            await asyncio.to_thread(pause.wait, PATIENCE)
        else:
            await asyncio.sleep(pause)
        return super().step(action)


class CountingTools:
    """Tools that take the time that the row says, and pay one each."""

    def reset(self, n, pauses, **row):
        self.turn_rewards, self._pauses = [], list(pauses)
        time.sleep(self._pauses.pop())
        return f":{n}"

    def e(self, x: str) -> str:
        """Say it again.\n\nArgs:\n    x: what."""
        time.sleep(self._pauses.pop())
        self.turn_rewards.append(1.0)
        return f"{x}!"

    async def f(self, x: str) -> str:
        """Say it later.\n\nArgs:\n    x: what."""
        await asyncio.sleep(self._pauses.pop())
        self.turn_rewards.append(1.0)
        return f"{x}?"


@pytest.mark.parametrize("capacity", [1, 3, None])
def test_no_more_episodes_than_places_and_places_are_refilled_at_once(capacity):
    engine = build(Counting)
    rows = [{"n": n, "turns": 1 + n % 4} for n in range(20)]
    admitted, released = set(), set()
    opening = engine.drivers[None].opening

    def watched_opening(episode, *args):
        admitted.add(episode.row)
        return opening(episode, *args)

    class Watching(ScriptedBackend):
        def step(self):
            # With a free place and an episode that waits for one, the place is taken.
            running = len(admitted - released)
            assert running == min(capacity or 20, 20 - len(released))
            return super().step()

        def release(self, key):
            released.add(key)
            super().release(key)

    engine.drivers[None].opening = watched_opening
    backend = Watching(steady, capacity=capacity, steps=lambda row, turn: 1 + row % 3)
    played = play(engine, backend, rows)
    assert played.reasons == ["terminated"] * 20
    assert [e.num_turns for e in played.episodes] == [row["turns"] for row in rows]
    if capacity == 1:
        order = [request.key for request in backend.requests]
        assert order == [n for n in range(20) for _ in range(1 + n % 4)]


class Releasing(ScriptedBackend):
    """Sets an event once so many episodes but the first are over."""

    def __init__(self, over, count, **options):
        super().__init__(steady, **options)
        self.over, self.left = over, set(range(1, count + 1))

    def release(self, key):
        super().release(key)
        self.left.discard(key)
        if not self.left:
            self.over.set()


@pytest.mark.parametrize(("kind", "whole"), [(Counting, False), (CountingAsync, False), (Counting, True)])
def test_one_slow_environment_holds_nobody_up(kind, whole):
    engine = build(kind)
    over = threading.Event()
    rows = [{"n": 0, "pauses": [0.0, over]}, *({"n": n, "turns": 8} for n in range(1, 6))]
    backend = Releasing(over, 5, whole_batches=whole)
    play(engine, backend, rows)
    order = [key for batch in backend.batches for key in batch]
    assert order.count(0) == 2
    assert order[-1] == 0


def test_whole_batches_gather(monkeypatch):
    # It ends once nobody else is expected, so what a busy machine takes does not matter.
    monkeypatch.setattr(engine_module, "LINGER_SECONDS", PATIENCE)

    def batches(whole):
        # Answers come a few milliseconds apart.
        rows = [{"n": n, "turns": 4, "pauses": [0.004 * (n % 3)] * 5} for n in range(6)]
        engine = build(Counting)
        backend = ScriptedBackend(steady, whole_batches=whole)
        played = play(engine, backend, rows)
        return len(backend.batches), [shown(e) for e in played.episodes]

    (gathered, episodes), (alone, same) = batches(True), batches(False)
    assert episodes == same
    assert gathered < alone
    assert gathered == 4


def test_the_seed_of_a_turn_names_rollout_row_and_turn():
    engine = build(Counting)
    played = play(engine, steady, [{"turns": 2}, {"turns": 3}], seed=(7, 0, 4), first_row=10)
    seeds = {(r.key, r.seed) for r in played.backend.requests}
    assert seeds == {
        *((0, (7, 0, 4, 10, turn)) for turn in range(2)),
        *((1, (7, 0, 4, 11, turn)) for turn in range(3)),
    }


KINDS = {"a": Counting, "b": CountingAsync, "t": CountingTools}


def schedule(number, engine):
    """One rollout under random pauses, places, steps and order of rows."""
    dice = random.Random(number)
    if number == 0:
        dice.random = lambda: 0.0
    names = [*"abt"] * 4
    pauses = [[dice.random() * 0.004 for _ in range(6)] for _ in range(12)]
    rows = [{"environment": names[n], "n": n, "turns": 1 + n % 4, "pauses": pauses[n]} for n in range(12)]
    calls = [["!e {}]", "!f {};e {}]", "!f {}]", "end {}]"][3 - n % 4 :] for n in range(12)]

    def script(row, turn):
        said = calls[row][turn] if names[row] == "t" else "a{}]"
        return said.replace("{}", f"{row}t{turn}")

    backend = ScriptedBackend(
        script,
        capacity=dice.choice([None, 1, 2, 5, 11]),
        steps=lambda row, turn: dice.randint(1, 3),
        whole_batches=number % 10 == 5,
        logprobs=lambda row, turn: True,
    )
    played = play(engine, backend, rows)
    assert played.reasons == ["no_action" if row["environment"] == "t" else "terminated" for row in rows]
    alike = ("action_mask", "logprobs", "turn_spans", "turn_rewards", "messages", "tool_calls")
    return [(shown(e), e.columns["n"], *(getattr(e, name) for name in alike)) for e in played.episodes]


@pytest.mark.long
@pytest.mark.parametrize("schedules", quick([25, 100], 25))
def test_random_schedules_play_the_same_episodes(schedules):
    engine = build(KINDS)
    first = schedule(0, engine)
    assert len({episode[0] for episode in first}) == 12
    for number in range(1, schedules + 1):
        assert schedule(number, engine) == first


def test_logprobs_that_one_turn_lacks_are_none_for_all():
    engine = build(Counting)
    rows = [{"turns": 2}, {"turns": 2}]
    for lacking in [(0, 0), (0, 1), (1, 1)]:
        backend = ScriptedBackend(steady, logprobs=lambda row, turn, no=lacking: (row, turn) != no)
        assert play(engine, backend, rows).result["logprobs"] is None
    backend = ScriptedBackend(steady, logprobs=lambda row, turn: True)
    logprobs = play(engine, backend, rows).result["logprobs"]
    assert [len(row) for row in logprobs] == [len("0.0][u 0.0!][a 0.1]")] * 2


class Breaking(ScriptedBackend):
    """Replaces what is returned for the second turn."""

    def __init__(self, result):
        super().__init__(steady)
        self.result = result

    def _result(self, request):
        return super()._result(request) if request.seed[-1] == 0 else self.result


@pytest.mark.parametrize(("result", "message"), [
    (TurnResult(0, ids("abcdef"), None), "sampled 6 tokens"),
    (TurnResult(0, ids("ab]"), [-1.0]), "1 logprobs for 3 tokens"),
])  # fmt: skip
def test_a_backend_that_breaks_its_promise_is_told_so(result, message):
    engine = build(Counting, max_turn_tokens=5)
    backend = Breaking(result)
    with pytest.raises(RuntimeError, match=message):
        play(engine, backend, [{}])
    assert not backend.held
