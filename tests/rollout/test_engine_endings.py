"""What an engine leaves behind: closed environments, text that can be tokenised, usable loops."""

import threading

import pytest

from tests.kit.rollout_kit import build, play, play_once, says
from tests.kit.waiting import PATIENCE, wait_until


class Closing:
    """Raises in its step where the row says so; counts its ends."""

    closed: list = []  # noqa: RUF012 - shared on purpose

    def reset(self, fails=False, **row):
        self.fails = fails
        return ""

    def step(self, action):
        if self.fails:
            raise RuntimeError("broken")
        return "done", 1.0, True, False, {}

    def close(self):
        Closing.closed.append(self)


class AsyncClosing(Closing):
    async def close(self):
        Closing.closed.append(self)


def test_broken_environments_are_closed_at_once_and_the_others_with_the_engine():
    for kind in (Closing, AsyncClosing):
        Closing.closed.clear()
        engine = build(kind)
        played = play(engine, says(["a]"], ["a]"], ["a]"]), [{}, {"fails": True}, {}])
        broken = played.episodes[1].env
        assert wait_until(lambda: Closing.closed == [broken])  # noqa: B023
        engine.close()
        assert len(Closing.closed) == 3
        assert set(map(id, Closing.closed)) == {id(e.env) for e in played.episodes}


@pytest.mark.long
def test_a_close_that_hangs_does_not_hold_the_engines_own():
    release, ended = threading.Event(), threading.Event()

    class Hanging(Closing):
        def close(self):
            release.wait(2 * PATIENCE)
            ended.set()

    engine = build(Hanging)
    play(engine, says(["a]"]))
    engine.close()
    assert not ended.is_set()
    release.set()
    assert ended.wait(PATIENCE)


def test_lone_surrogates_are_replaced():
    class Undecodable(Closing):
        def reset(self, **row):
            self.count = 0
            return "o\udce4o"

        def step(self, action):
            self.count += 1
            return "x\ud800y", 0.0, self.count == 2, False, {}

    played = play_once(Undecodable, says(["a]", "b]"]))
    assert played.reasons == ["terminated"]
    assert played.only.messages[1]["content"] == "x?y"
    assert played.only.prompt[-1]["content"].endswith("o?o")
