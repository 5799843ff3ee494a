"""Environments that fail in every way at random: nothing but their own episodes is lost."""

import contextlib
import ctypes
import gc
import logging
import re
import threading
import time
from pathlib import Path

import pytest

from tests.kit import fault_envs
from tests.kit.fault_envs import FACTORIES, draw, expected, say
from tests.kit.rollout_kit import PROMPT, ScriptedBackend, build, environment_threads, play
from tests.kit.tiers import quick
from tests.kit.waiting import PATIENCE, wait_until
from trl_stppo.rollout.record import FAILURES, StopReason

TIMEOUT = fault_envs.HANG_SECONDS / 5


def resident_megabytes():
    """What is alive: neither mapped files, which come and go, nor what earlier tests have freed."""
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def told(episode):
    """Everything about an episode that must not depend on the others."""
    times = ("env", "seconds", "deadline")
    return {k: v for k, v in vars(episode).items() if not k.startswith(("_", *times))}


def play_batch(engine, rows):
    first = rows[0]["n"]
    backend = ScriptedBackend(lambda row, turn: say(rows[row - first], turn), logprobs=lambda row, turn: True)
    started = time.monotonic()
    played = play(engine, backend, rows, [PROMPT] * len(rows), seed=(3,), first_row=first)
    return played, time.monotonic() - started


def check_row(episode, row):
    """The episode is the row's own, whatever has happened to it."""
    n = row["n"]
    assert episode.columns == {k: v for k, v in row.items() if k != "environment"}
    assert episode.name == row["environment"]
    opened = [{"role": "user", "content": f"q:{n}"}]
    assert episode.prompt in (PROMPT, opened)
    if episode.turn_spans:
        assert episode.prompt == opened
    said = [m["content"] for m in episode.messages if m["role"] == "assistant"]
    assert said == [say(row, turn).removesuffix("]") for turn in range(len(episode.turn_spans))]
    assert len(episode.turn_rewards) == len(episode.turn_spans)


def check_record(record, episodes, rows):
    reasons = [expected(row) for row in rows]
    failed = [reason in FAILURES for reason in reasons]
    assert record.stop_reasons == reasons
    assert record.errors.count(None) == failed.count(False)
    assert [error is not None for error in record.errors] == failed
    final = (*FAILURES, StopReason.TERMINATED, StopReason.NO_ACTION)
    assert record.terminated == [reason in final for reason in reasons]
    for i, (row, episode, bad) in enumerate(zip(rows, episodes, failed, strict=True)):
        assert record.trains[i] == (not bad)
        assert record.turn_rewards[i] == episode.turn_rewards
        assert record.has_turn_rewards[i] or (bad and not episode.turn_spans)
        if bad and row["kind"] == "text" and episode.turn_spans:
            paid = [float(turn) for turn in range(1, len(episode.turn_spans))]
            assert episode.turn_rewards == [*paid, 0.0]


@pytest.mark.long
@pytest.mark.parametrize(("batches", "size"), quick([(3, 90), (4, 200), (12, 200)], (3, 90)))
def test_hundreds_and_thousands_of_episodes_with_faults(batches, size, caplog):
    caplog.set_level(logging.ERROR)
    fault_envs.MISUSED.clear()
    threads = set(threading.enumerate())
    limits = {"max_completion_tokens": 400, "max_context_tokens": 800}
    engine = build(FACTORIES, env_timeout_seconds=TIMEOUT, **limits)
    healthy = build(FACTORIES, **limits)
    memory, faults, ends = [], 0, set()
    for batch in range(batches):
        rows = [draw(n) for n in range(batch * size, (batch + 1) * size)]
        played, took = play_batch(engine, rows)
        without, _ = play_batch(healthy, [{**row, "fault": None} for row in rows])
        assert [episode.row for episode in played.episodes] == list(range(size))
        for row, episode, fine in zip(rows, played.episodes, without.episodes, strict=True):
            check_row(episode, row)
            if row["fault"] is None:
                assert told(episode) == told(fine)
            ends.add((row["kind"], row["fault"], episode.stop_reason))
        check_record(played.record, played.episodes, rows)
        faults += sum(row["fault"] is not None for row in rows)
        hangs = sum(row["fault"] == "hang" for row in rows)
        assert took < PATIENCE + hangs * TIMEOUT
        memory.append(resident_megabytes())
    engine.close()
    healthy.close()
    assert fault_envs.MISUSED == []
    assert faults > 0.08 * size * batches
    assert len(ends) > 12
    assert memory[-1] - memory[2] < 40, memory
    assert wait_until(lambda: not environment_threads())
    assert wait_until(lambda: set(threading.enumerate()) <= threads)


def one_row(kind, fault, when, turns=2):
    return {"environment": kind, "kind": kind, "n": 0, "turns": turns, "fault": fault, "when": when}


@pytest.mark.parametrize("when", ["reset", "turn", "score"])
def test_a_failed_episode_teaches_nothing(when, caplog):
    engine = build(FACTORIES)
    kind = "tools" if when == "score" else "text"
    played, _ = play_batch(engine, [one_row(kind, "exit", when)])
    episode, record = played.only, played.record
    turns = {"reset": 0, "turn": 2, "score": 3}[when]
    paid = {"reset": [], "turn": [1.0, 0.0], "score": [0.5, 1.0, 0.0]}[when]
    assert record.turn_rewards == [paid]
    assert len(episode.turn_spans) == turns
    assert record.trains == [False]
    assert (record.terminated, record.truncated) == ([True], [False])
    assert record.stop_reasons == [StopReason.ENV_ERROR]
    [error] = record.errors
    assert re.fullmatch(r"SystemExit: 3 \(fault_envs\.py:\d+\)", error)
    assert record.final_rewards == [None]
    assert f"1 of 1 episodes ended in a failure: {error} (1x)" in caplog.text


class Sometimes:
    """Fails unless the row says otherwise."""

    def reset(self, fine=False, **row):
        if not fine:
            raise ConnectionError("nobody there")

    def step(self, action):
        return "", 1.0, True, False, {}


def outcomes(engine, *fine):
    return play(engine, lambda row, turn: "a]", [{"fine": one} for one in fine]).reasons


def test_failures_for_long_end_the_run_saying_what_happened(caplog):
    engine = build(Sometimes)
    for _ in range(3):
        assert outcomes(engine, *[False] * 20) == ["env_error"] * 20
    assert outcomes(engine, *[False] * 3) == ["env_error"] * 3
    expected = r"The last 64 episodes all .* The newest: ConnectionError: nobody there \(.*\)\. Try "
    with pytest.raises(RuntimeError, match=expected):
        outcomes(engine, False)


def test_a_large_batch_fails_as_a_whole_or_goes_on():
    engine = build(Sometimes)
    assert outcomes(engine, *[False] * 99, True)[-1] == "terminated"
    assert outcomes(engine, True, *[False] * 99)[0] == "terminated"
    with pytest.raises(RuntimeError, match="The last 199 episodes"):
        outcomes(engine, *[False] * 100)
