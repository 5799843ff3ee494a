"""Text environments and TRL's tool environments are told apart by what `step` returns."""

from __future__ import annotations

import pytest
from trl_stppo.rollout.kinds import is_text_environment, split_environments


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


class Tools:
    made = 0

    def __init__(self):
        type(self).made += 1

    def reset(self, **row):
        return None

    def look(self, word: str) -> str:
        """Look.

        Args:
            word: a word.
        """
        return word


class ToolCalledStep(Tools):
    def step(self, direction: str) -> str:
        """Walk.

        Args:
            direction: where to.
        """
        return direction


class StringAnnotated(Tools):
    def step(self, direction: str) -> str:
        """Walk.

        Args:
            direction: where to.
        """
        return direction


class StepIsData(Tools):
    step = 3


class NoReset:
    def step(self, action):
        return "", 0.0, True, False, {}


@pytest.mark.parametrize(
    ("environment", "is_text"),
    [
        (Text, True),
        (Annotated, True),
        (Tools, False),
        (ToolCalledStep, False),
        (StringAnnotated, False),
        (StepIsData, False),
    ],
)
def test_a_step_that_does_not_return_a_str_makes_a_text_environment(environment, is_text):
    assert is_text_environment(environment()) is is_text


def test_without_environments_there_is_nothing_to_split():
    assert split_environments(None) == (None, None)


def test_one_text_factory_is_ours_under_the_name_none():
    text, tools = split_environments(Text)
    assert tools is None
    assert list(text) == [None]


def test_one_tool_factory_goes_to_trl_as_a_factory():
    text, tools = split_environments(Tools)
    assert text is None
    assert isinstance(tools(), Tools)


def test_named_factories_keep_their_names():
    text, tools = split_environments({"a": Text, "b": Annotated})
    assert (list(text), tools) == (["a", "b"], None)
    text, tools = split_environments({"a": Tools, "b": ToolCalledStep})
    assert (text, list(tools)) == (None, ["a", "b"])


@pytest.mark.parametrize("environment", [Text, Tools])
def test_the_instance_that_was_probed_is_the_first_one_handed_out(environment):
    before = environment.made
    text, tools = split_environments(environment)
    factory = text[None] if text else tools
    assert environment.made == before + 1
    first = factory()
    assert environment.made == before + 1
    second = factory()
    assert environment.made == before + 2
    assert first is not second


def test_a_mixture_of_both_kinds_is_refused_naming_them():
    with pytest.raises(ValueError, match=r"mixes text environments \(\['t'\]\) and .*\(\['w'\]\)"):
        split_environments({"t": Text, "w": Tools})


@pytest.mark.parametrize("factory", [NoReset, {"name": NoReset}])
def test_an_environment_without_reset_is_refused(factory):
    with pytest.raises(ValueError, match="`environment_factory` made a NoReset without a `reset`"):
        split_environments(factory)
