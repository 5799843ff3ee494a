"""What a tool gives is judged by its value, and its thread has an event loop as the main thread has."""

import asyncio
import functools
import logging
import os

import pytest

from tests.kit.isolated_envs import LoopBound
from tests.kit.rollout_kit import build, play, play_once, says
from trl_stppo.envs import check_env
from trl_stppo.errors import EnvironmentContractError
from trl_stppo.rollout.isolation import isolated
from trl_stppo.rollout.workers import LazyLoop


class Later:
    def __await__(self):
        yield from asyncio.sleep(0).__await__()
        return "later"


async def gone(x):
    await asyncio.sleep(0)
    return f"gone {x}"


@functools.wraps(gone)
def decorated(*args):
    return gone(*args)


GIVEN = {
    "decorated": decorated,
    "partial": functools.partial(gone),
    "awaitable": lambda x: Later(),
    "loop": lambda x: asyncio.get_event_loop().run_until_complete(gone(x)),
    "runs": lambda x: asyncio.run(gone(x)),
    "generator": lambda x: (c for c in x),
    "async_generator": lambda x: _parts(),
    "object": lambda x: object(),
    "held": lambda x: [object()],
    "bytes": lambda x: b"b",
}


async def _parts():
    yield 1


class Giver:
    """One tool, which gives what its argument says."""

    def reset(self, **row):
        return None

    def give(self, what: str) -> str:
        """Give.\n\nArgs:\n    what: which."""
        return GIVEN[what]("x")


def give(x: str) -> str:
    """Give.\n\nArgs:\n    x: which."""
    return GIVEN[x]("x")


def answers(*names):
    turn = ";".join(f"give {name}" for name in names)
    episode = play_once(None, says([f"!{turn}]", "end]"]), standalone=[give]).only
    return [m["content"] for m in episode.messages if m["role"] == "tool"], episode


@pytest.mark.parametrize(("name", "answer"), [
    ("decorated", "gone x"), ("partial", "gone x"), ("awaitable", "later"), ("loop", "gone x"),
])  # fmt: skip
def test_what_can_be_awaited_is_awaited(name, answer):
    assert answers(name)[0] == [answer]


def test_a_loop_is_there_after_a_turn_that_removed_it():
    script = says(["!give runs]", "!give loop]", "end]"])
    episode = play_once(None, script, standalone=[give]).only
    assert [m["content"] for m in episode.messages if m["role"] == "tool"] == ["gone x"] * 2


@pytest.mark.parametrize(("name", "kind"), [
    ("generator", "generator"), ("async_generator", "async_generator"), ("object", "object"),
    ("held", "list"), ("bytes", "bytes"),
])  # fmt: skip
def test_what_is_no_text_number_or_json_fails_the_call(name, kind):
    (said,), episode = answers(name)
    assert episode.tool_failures == 1
    assert f"`give` returned a {kind}; allowed" in said
    assert " at 0x" not in said


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX")
def test_an_isolated_tool_has_a_loop_too_and_what_it_gives_is_awaited():
    turn = "!run x;look x;later x]"
    episode = play_once(isolated(LoopBound), says([turn, "end]"])).only
    assert [m["content"] for m in episode.messages if m["role"] == "tool"] == ["x"] * 3


def test_reset_and_step_find_a_loop_and_keep_it():
    class Bound:
        def reset(self, seed):
            self.loop = asyncio.get_event_loop()
            return self.loop.run_until_complete(gone("a")), {}

        def step(self, action):
            same = asyncio.get_event_loop() is self.loop
            return self.loop.run_until_complete(gone("b")), float(same), False, False, {}

    played = play_once(Bound, says(["one]", "two]", "three]"]), max_turns=3)
    assert played.only.turn_rewards == [1.0, 1.0, 1.0]


def test_check_env_awaits_them_too_and_names_what_no_model_reads():
    row = [{"prompt": "p"}]
    for name in ("decorated", "awaitable", "loop"):
        assert check_env(Giver, row, actions=[("give", {"what": name})]) == []
    with pytest.raises(EnvironmentContractError, match="give returned a generator; allowed"):
        check_env(Giver, row, actions=[("give", {"what": "generator"})])


def test_that_all_calls_fail_is_said_once(caplog):
    def broken(x: str) -> str:
        """Break.\n\nArgs:\n    x: what."""
        raise TimeoutError

    engine = build(None, standalone=[broken, give])
    with caplog.at_level(logging.WARNING):
        play(engine, says(["!broken a;give loop]", "end]"]))
        assert not caplog.records
        for _ in range(2):
            play(engine, says(["!broken a]", "!broken b]", "end]"]))
    (record,) = caplog.records
    assert "All 2 tool calls" in record.getMessage()
    assert "TimeoutError" in record.getMessage()


def test_a_loop_takes_no_file_descriptor_before_its_first_use():
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    loops = [LazyLoop() for _ in range(100)]
    assert not any(map(vars, loops))
    assert not before or len(os.listdir("/proc/self/fd")) == before
    assert loops[0].run_until_complete(gone("x")) == "gone x"
