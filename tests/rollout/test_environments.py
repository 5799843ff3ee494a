"""Text environments and TRL's tool environments are told apart by what `step` returns; instances."""

from __future__ import annotations

import asyncio

import pytest

from trl_stppo.rollout.environments import EnvironmentPool, is_text_environment, split_environments


class Text:
    made = 0

    def __init__(self):
        type(self).made += 1

    def reset(self, **row):
        return "", {}

    def step(self, action):
        return "", 0.0, True, False, {}


class Annotated(Text):
    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        return "", 0.0, True, False, {}


class Asynchronous(Text):
    async def step(self, action: str):
        return "", 0.0, True, False, {}


class Tools:
    made = 0

    def __init__(self):
        type(self).made += 1

    def reset(self, **row):
        return None

    def look(self, word: str) -> str:
        """Look.\n\nArgs:\n    word: a word."""
        return word


class ToolCalledStep(Tools):
    def step(self, direction: str) -> str:
        """Walk.\n\nArgs:\n    direction: where to."""
        return direction


class RealAnnotation(Tools):
    def step(self, direction):
        return direction

    step.__annotations__["return"] = str


class StepIsData(Tools):
    step = 3


class NoReset:
    def step(self, action):
        return "", 0.0, True, False, {}


class ResetIsData(NoReset):
    reset = 3


def test_a_step_that_does_not_return_a_str_makes_a_text_environment():
    assert all(is_text_environment(kind()) for kind in (Text, Annotated, Asynchronous))
    for kind in (Tools, ToolCalledStep, RealAnnotation, StepIsData):
        assert not is_text_environment(kind())


@pytest.mark.parametrize(("environment", "kind"), [(Text, 0), (ToolCalledStep, 1)])
def test_one_factory_is_known_under_the_name_none(environment, kind):
    before = environment.made
    *kinds, probes = split_environments(environment)
    assert kinds[kind] == {None: environment}
    assert kinds[1 - kind] == {}
    assert list(probes) == [None]
    assert isinstance(probes[None], environment)
    assert environment.made == before + 1


def test_named_factories_keep_their_names_and_both_kinds_may_be_mixed():
    factories = {"a": Text, "b": Tools, "c": Annotated}
    text, tools, probes = split_environments(factories)
    assert text == {"a": Text, "c": Annotated}
    assert tools == {"b": Tools}
    assert {name: type(probe) for name, probe in probes.items()} == factories


@pytest.mark.parametrize("kind", [NoReset, ResetIsData])
def test_an_environment_without_reset_is_refused(kind):
    for factory in (kind, {"name": kind}):
        with pytest.raises(ValueError, match=f"made a {kind.__name__} without a `reset`"):
            split_environments(factory)


def test_an_instance_in_place_of_a_factory_is_refused():
    for given in (Text(), {"one": Text, "two": Text()}):
        with pytest.raises(ValueError, match="`environment_factory` is or holds 'Text'"):
            split_environments(given)


def test_the_instance_that_was_looked_at_is_the_first_of_the_pool():
    probe = Text()
    pool = EnvironmentPool({None: Text}, {None: probe})
    assert pool.take(None, 0) is probe
    second = pool.take(None, 1)
    assert second is not probe
    assert pool.take(None, 1) is second


def test_a_discarded_instance_is_replaced_and_the_others_stay():
    pool = EnvironmentPool({"a": Text, "b": Text})
    first, other, same_index = pool.take("a", 0), pool.take("a", 1), pool.take("b", 0)
    pool.discard("a", 0)
    again = pool.take("a", 0)
    assert again is not first
    assert pool.take("a", 0) is again
    assert (pool.take("a", 1), pool.take("b", 0)) == (other, same_index)
    pool.discard("a", 5)


def test_closing_closes_what_can_be_closed_and_forgets_the_rest(caplog):
    closed = []

    class Closing(Text):
        def close(self):
            closed.append(self)

    class Failing(Text):
        def close(self):
            raise OSError("no")

    class AsyncClosing(Text):
        async def close(self):
            closed.append(self)

    class ToolCalledClose(Tools):
        def close(self, door: str = "front") -> str:
            closed.append(self)

    kinds = {"f": Failing, "t": ToolCalledClose, "a": AsyncClosing, "p": Text, "c": Closing}
    pool = EnvironmentPool(kinds)
    made = [pool.take(name, 0) for name in kinds]
    pool.close(asyncio.run)
    assert closed == [made[2], made[4]]
    assert "Failing.close raised OSError('no')" in caplog.text
    pool.close(asyncio.run)
    assert len(closed) == 2
