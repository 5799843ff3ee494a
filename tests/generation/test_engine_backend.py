"""The backends over vLLM's engine, in this process or behind a server, with stand-ins for both."""

import threading
import time
from types import SimpleNamespace

import pytest

from tests.kit.waiting import PATIENCE, wait_until
from trl_stppo.generation.engine import EngineBackend, ServerBackend
from trl_stppo.generation.protocol import TurnRequest, TurnResult


class Engine:
    """Samples one token of each request in a step: the last one of its row plus one, and so on.

    At most two requests run at a time; the others queue.
    """

    def __init__(self) -> None:
        self.requests, self.aborted, self.steps = {}, [], 0

    def waiting(self):
        return max(0, len(self.requests) - 2)

    def add_request(self, name, prompt, *, params, lora_request):
        if params["limit"] == 13:
            raise ValueError("unlucky")
        assert name not in self.requests
        self.requests[name] = (prompt["prompt_token_ids"], params["limit"], lora_request, [])

    def step(self):
        self.steps += 1
        outputs = []
        for name in list(self.requests)[:2]:
            row, limit, _, ids = self.requests[name]
            ids.append(row[-1] + len(ids) + 1)
            done = len(ids) == limit
            logprobs = [{i: SimpleNamespace(logprob=-float(i)), 0: None} for i in ids]
            turn = SimpleNamespace(token_ids=tuple(ids), logprobs=logprobs)
            said = {"request_id": name, "finished": done, "outputs": [turn]}
            known = {"prompt_token_ids": row, "num_cached_tokens": len(row) - 1}
            outputs.append(SimpleNamespace(**said, **known))
            if done:
                del self.requests[name]
        return outputs

    def abort_request(self, names):
        for name in names:
            self.aborted.append(name)
            del self.requests[name]


def backend(capacity=None):
    engine = Engine()

    def make(request):
        return {"params": {"limit": request.max_new_tokens}, "lora_request": "policy-3"}

    return engine, EngineBackend(engine, make, capacity=capacity)


def test_turns_end_when_they_end_and_others_begin_in_between() -> None:
    engine, turns = backend()
    assert not turns.busy
    assert turns.step() == []
    assert engine.steps == 0, "nothing to do"
    turns.add(TurnRequest(4, [1, 20], 3, (0, 4)))
    turns.add(TurnRequest(2, [50], 1, (0, 2)))
    assert [entry[2] for entry in engine.requests.values()] == ["policy-3"] * 2
    assert turns.step() == [TurnResult(2, [51], [-51.0])]
    turns.add(TurnRequest(2, [50, 51, 60], 2, (0, 2)))
    assert turns.step() == []
    assert turns.busy
    assert sorted(turns.step(), key=lambda r: r.key) == [
        TurnResult(2, [61, 62], [-61.0, -62.0]),
        TurnResult(4, [21, 22, 23], [-21.0, -22.0, -23.0]),
    ]
    assert not turns.busy


def test_a_released_turn_stops_and_its_episode_may_ask_again() -> None:
    engine, turns = backend(capacity=1)
    turns.add(TurnRequest(7, [1], 5, (0,)))
    turns.step()
    turns.release(7)
    turns.release(7)
    assert engine.aborted == ["7:0"]
    assert not turns.busy
    turns.add(TurnRequest(8, [30], 1, (0,)))
    assert turns.step() == [TurnResult(8, [31], [-31.0])]
    turns.release(8)
    assert engine.aborted == ["7:0"], "there was nothing to stop"


def test_a_second_turn_and_a_refusal() -> None:
    engine, turns = backend()
    turns.add(TurnRequest(1, [1], 2, (0,)))
    with pytest.raises(RuntimeError, match="Episode 1 already has a turn in flight"):
        turns.add(TurnRequest(1, [1], 2, (0,)))
    turns.release(1)
    with pytest.raises(ValueError, match="unlucky"):
        turns.add(TurnRequest(3, [1], 13, (0,)))
    turns.release(3)
    assert not turns.busy
    assert not engine.requests
    turns.add(TurnRequest(4, [1], 1, (0,)))
    assert turns.step() == [TurnResult(4, [2], [-2.0])]


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
