"""The backend over a server that may fail: asked again, given up, weights that come and go."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from tests.kit.waiting import PATIENCE, wait_until
from trl_stppo.generation import server as module
from trl_stppo.generation.protocol import TurnRequest, TurnResult
from trl_stppo.generation.server import ServerBackend, ServerError

AWAY = ServerError("away", unreachable=True)


class Server:
    """Answers a turn with its limit, unless its script says otherwise for this episode.

    Args:
        script: per episode what happens at each request: an exception, a callable, or None.
    """

    def __init__(self, **script) -> None:
        self.script = {int(k[1:]): list(v) for k, v in script.items()}
        self.name, self.asked = "run-5#1", []
        self.lock = threading.Lock()

    def sample(self, request):
        with self.lock:
            self.asked.append(request.key)
            todo = self.script.get(request.key)
            now = todo.pop(0) if todo else None
        if callable(now):
            now()
        elif now is not None:
            raise now
        return [request.max_new_tokens], [-1.0]

    def weights_name(self):
        return self.name


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.002)


def play(server, keys=(0,), **options):
    """Ask for one turn of each episode and step until all have been answered."""
    turns = ServerBackend(server, "run-5#1", **{"patience": PATIENCE, **options})
    for key in keys:
        turns.add(TurnRequest(key, [1], key + 1, (key,)))
    results, until = [], time.monotonic() + PATIENCE
    while turns.busy:
        assert time.monotonic() < until
        results += turns.step()
    return turns, sorted(results, key=lambda r: r.key)


def test_each_turn_has_its_own_limit_and_nobody_waits_for_another() -> None:
    slow, started = threading.Event(), time.monotonic()
    server = Server(_0=[lambda: slow.wait(PATIENCE)])
    turns = ServerBackend(server, "run-5#1", patience=PATIENCE)
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


def test_what_fails_is_asked_again_and_the_log_says_so_once(caplog) -> None:
    server = Server(_0=[AWAY, ServerError("500")], _2=[AWAY] * 3)
    turns, results = play(server, keys=(0, 1, 2))
    assert results == [TurnResult(k, [k + 1], [-1.0]) for k in range(3)]
    assert turns.retries == 5
    assert sorted(server.asked) == [0] * 3 + [1] + [2] * 4
    assert caplog.text.count("Turns are requested again") == 1
    caplog.clear()
    play(Server(_0=[AWAY]), warned=True)
    assert caplog.text == ""


@pytest.mark.long
def test_errors_are_given_up_after_some_but_absence_does_not_count(monkeypatch) -> None:
    script = [AWAY] * 9 + [ServerError("out of memory")] * module.TRIES
    _, (result,) = play(Server(_0=script))
    assert result == TurnResult(0, [], None, "out of memory")
    _, (result,) = play(Server(_0=script[:-1]))
    assert result.ids == [1]


def test_absence_is_given_up_in_time_and_by_all_who_come_later() -> None:
    server, started = Server(_0=[AWAY] * 10_000, _1=[AWAY] * 10_000), time.monotonic()
    turns, (result,) = play(server, patience=0.2)
    took = time.monotonic() - started
    assert result.error == "away"
    assert 0.2 < took < PATIENCE
    turns.release(0)
    asked = len(server.asked)
    turns.add(TurnRequest(1, [1], 2, (1,)))
    while turns.busy:
        turns.step()
    assert len(server.asked) == asked + 1, "one more look is enough"
    turns.add(TurnRequest(2, [1], 2, (1,)))
    while turns.busy:
        assert turns.step() in ([], [TurnResult(2, [2], [-1.0])])


def test_a_turn_that_is_never_answered_ends_although_others_are() -> None:
    server = Server(_0=[AWAY] * 10_000)
    turns = ServerBackend(server, "run-5#1", patience=0.05)
    turns.add(TurnRequest(0, [1], 1, (0,)))
    others, results, until = itertools.count(1), [], time.monotonic() + PATIENCE
    while not any(result.key == 0 for result in results):
        assert time.monotonic() < until
        key = next(others)
        turns.add(TurnRequest(key, [1], 1, (key,)))
        time.sleep(0.01)
        results += turns.step()
    assert [result.error for result in results if result.error] == ["away"]


def test_a_refusal_is_raised_where_the_rollout_is_played() -> None:
    with pytest.raises(RuntimeError, match="too long"):
        play(Server(_0=[RuntimeError("too long")]))


def test_a_released_turn_is_forgotten_whenever_its_answer_comes() -> None:
    gates = threading.Event(), threading.Event()
    server = Server(_0=[lambda gate=gate: gate.wait(PATIENCE) for gate in gates])
    turns = ServerBackend(server, "run-5#1", patience=PATIENCE)
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


def test_turns_of_lost_weights_do_not_count_and_the_weights_are_sent_again(caplog) -> None:
    server, sent = Server(), []

    def restart():
        server.name = "default"

    def send():
        if not sent:
            sent.append("too early")
            raise AWAY
        sent.append("sent")
        server.name = "run-5#2"
        return server.name

    server.script = {0: [restart]}
    turns, results = play(server, keys=(0, 1), send_weights=send)
    assert [r.ids for r in results] == [[1], [2]]
    assert sent == ["too early", "sent"]
    assert server.asked.count(0) >= 2, "what was sampled while the weights were lost is asked again"
    assert "has the policy's weights again" in caplog.text
    assert turns.retries >= 1


def test_who_cannot_send_them_waits_for_the_process_that_can() -> None:
    server = Server()

    def restart():
        server.name = "default"
        threading.Timer(0.05, setattr, (server, "name", "run-5#2")).start()

    server.script = {0: [restart]}
    _, (result,) = play(server)
    assert result.ids == [1]


def test_weights_of_another_update_never_pass() -> None:
    server = Server(_0=[lambda: setattr(server, "name", "run-6")])
    _, (result,) = play(server, patience=0.1)
    assert result.ids == []
    assert "run-6" in result.error
    assert len(server.asked) == 1


def test_where_nobody_will_send_them_the_episode_ends_soon() -> None:
    server = Server(_0=[lambda: setattr(server, "name", "default")])
    _, (result,) = play(server, awaits_weights=False)
    assert "restarted" in result.error
    assert len(server.asked) == 1, "nobody samples with weights that are not the right ones"
