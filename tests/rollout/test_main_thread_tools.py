"""Tools that work on the main thread only, as a time limit by an alarm does."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from tests.kit.rollout_kit import build, play, play_once, says

MAIN = threading.main_thread()


def alarmed(x: str) -> str:
    """Answer within a second.\n\nArgs:\n    x: what."""
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, before)
    return f"{x} on the main thread: {threading.current_thread() is MAIN}"


def alarmed_for(seconds):
    def slow(x: str) -> str:
        """Take a while.\n\nArgs:\n    x: what."""
        alarmed(x)
        time.sleep(seconds)
        return x

    return slow


def plain(x: str) -> str:
    """Say it.\n\nArgs:\n    x: what."""
    return f"{x} on the main thread: {threading.current_thread() is MAIN}"


def answers(played) -> list[str]:
    return [m["content"] for m in played.record.messages[0] if m["role"] == "tool"]


def test_a_tool_that_sets_signal_handlers_works_and_the_others_stay_off_the_main_thread():
    script = says(["!alarmed a;plain b]", "!alarmed c]", "end]"])
    played = play_once(None, script, standalone=[alarmed, plain])
    told = [("a", True), ("b", False), ("c", True)]
    assert answers(played) == [f"{x} on the main thread: {main}" for x, main in told]
    assert played.only.tool_failures == 0


def test_its_first_failure_is_remembered():
    begun = []

    class Board:
        def reset(self, **row):
            begun.clear()

        def move(self, x: str) -> str:
            """Move.\n\nArgs:\n    x: where."""
            begun.append(threading.current_thread() is MAIN)
            return alarmed(x)

    play_once(Board, says(["!move a]", "!move b]", "end]"]))
    assert begun == [False, True, True]


def test_what_it_raises_is_its_answer():
    def broken(x: str) -> str:
        """Break.\n\nArgs:\n    x: what."""
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        raise LookupError(x)

    played = play_once(None, says(["!broken a]", "end]"]), standalone=[broken])
    assert answers(played) == ["{'error': 'a'}"]


@pytest.mark.long
def test_the_wait_for_the_main_thread_is_not_the_tools_time():
    engine = build(None, standalone=[alarmed_for(0.2)], env_timeout_seconds=1.0)
    played = play(engine, says(*[["!slow a]", "end]"]] * 8), rows=[{}] * 8)
    assert not [reason for reason in played.reasons if "timeout" in str(reason)]
    assert played.record.tool_failures == 0


def test_a_tool_that_takes_too_long_on_the_main_thread_has_timed_out():
    slow = alarmed_for(0.4)
    played = play_once(None, says(["!slow a]", "end]"]), standalone=[slow], env_timeout_seconds=0.2)
    assert [str(reason) for reason in played.reasons] == ["env_timeout"]
