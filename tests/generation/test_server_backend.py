"""The backend over a server: turns by themselves, and errors that end a rollout."""

from __future__ import annotations

import threading
import time

import pytest

from tests.kit.waiting import PATIENCE, wait_until
from trl_stppo.generation.protocol import TurnRequest, TurnResult
from trl_stppo.generation.engine import ServerBackend


class Server:
    """Answers a turn with its limit, after the waits in its script for this episode."""

    def __init__(self, **script) -> None:
        self.script = {int(k[1:]): list(v) for k, v in script.items()}
        self.asked = []
        self.lock = threading.Lock()

    def sample(self, request):
        with self.lock:
            self.asked.append(request.key)
            todo = self.script.get(request.key)
            wait = todo.pop(0) if todo else None
        if wait is not None:
            wait()
        return [request.max_new_tokens], [-1.0]


def test_each_turn_has_its_own_limit_and_nobody_waits_for_another() -> None:
    slow, started = threading.Event(), time.monotonic()
    turns = ServerBackend(Server(_0=[lambda: slow.wait(PATIENCE)]).sample)
    assert turns.step() == []
    for key in range(3):
        turns.add(TurnRequest(key, [1], key + 1, (key,)))
    first = []
    while len(first) < 2:
        first += turns.step()
    assert {r.key for r in first} == {1, 2}
    assert turns.busy
    slow.set()
    while turns.busy:
        first += turns.step()
    assert sorted(first, key=lambda r: r.key) == [TurnResult(k, [k + 1], [-1.0]) for k in range(3)]
    assert time.monotonic() - started < PATIENCE


def test_an_error_is_raised_where_the_rollout_is_played() -> None:
    def refuse(request):
        raise RuntimeError("too long")

    turns = ServerBackend(refuse)
    turns.add(TurnRequest(0, [1], 1, (0,)))
    with pytest.raises(RuntimeError, match="too long"):
        assert wait_until(lambda: turns.step() != [])


def test_a_released_turn_is_forgotten_whenever_its_answer_comes() -> None:
    gates = threading.Event(), threading.Event()
    server = Server(_0=[lambda gate=gate: gate.wait(PATIENCE) for gate in gates])
    turns = ServerBackend(server.sample)
    for number, limit in enumerate((3, 8)):
        turns.add(TurnRequest(0, [1], limit, (number,)))
        assert wait_until(lambda: len(server.asked) == number + 1)  # noqa: B023
        if number == 0:
            turns.release(0)
            assert not turns.busy
    gates[0].set()
    for _ in range(20):
        assert turns.step() == []
    gates[1].set()
    results = []
    while turns.busy:
        results += turns.step()
    assert results == [TurnResult(0, [8], [-1.0])]
