"""What a tool gives is judged by its value."""

import asyncio
import functools
import logging

import pytest

from tests.kit.rollout_kit import build, play, play_once, says
from trl_stppo.envs import check_env
from trl_stppo.errors import EnvironmentContractError


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
    ("decorated", "gone x"), ("partial", "gone x"), ("awaitable", "later"), ("runs", "gone x"),
])  # fmt: skip
def test_what_can_be_awaited_is_awaited(name, answer):
    assert answers(name)[0] == [answer]


@pytest.mark.parametrize(("name", "kind"), [
    ("generator", "generator"), ("async_generator", "async_generator"), ("object", "object"),
    ("held", "list"), ("bytes", "bytes"),
])  # fmt: skip
def test_what_is_no_text_number_or_json_fails_the_call(name, kind):
    (said,), episode = answers(name)
    assert episode.tool_failures == 1
    assert f"`give` returned a {kind}; allowed" in said
    assert " at 0x" not in said


def test_check_env_awaits_them_too_and_names_what_no_model_reads():
    row = [{"prompt": "p"}]
    for name in ("decorated", "awaitable", "runs"):
        assert check_env(Giver, row, actions=[("give", {"what": name})]) == []
    with pytest.raises(EnvironmentContractError, match="give returned a generator; allowed"):
        check_env(Giver, row, actions=[("give", {"what": "generator"})])


def test_that_all_calls_fail_is_said_once(caplog):
    def broken(x: str) -> str:
        """Break.\n\nArgs:\n    x: what."""
        raise TimeoutError

    engine = build(None, standalone=[broken, give])
    with caplog.at_level(logging.WARNING):
        play(engine, says(["!broken a;give runs]", "end]"]))
        assert not caplog.records
        for _ in range(2):
            play(engine, says(["!broken a]", "!broken b]", "end]"]))
    (record,) = caplog.records
    assert "All 2 tool calls" in record.getMessage()
    assert "TimeoutError" in record.getMessage()
