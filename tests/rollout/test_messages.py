"""The one form of messages: what is brought to it, and what is left as it is."""

import copy
from decimal import Decimal

import numpy as np
import pytest

from trl_stppo.envs.base import result_text
from trl_stppo.errors import EnvironmentContractError
from trl_stppo.rollout.messages import check_turn, read_messages

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [{"c": 2}]}}}
IN_ORDER = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": "x", "reasoning_content": "why", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "3"},
    {"role": "assistant", "tool_calls": [{**CALL, "id": "c1"}]},
    {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "[null, {}]"},
    {"role": "tool", "content": "no name, no call"},
    {"role": "critic", "content": "a role of one template", "train": False, "weights": [1, 2.5]},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {}}]},
]


def read(message, *before):
    return read_messages([*before, message])[-1]


def test_what_is_in_order_comes_out_equal_and_the_row_stays_as_it_is():
    before = copy.deepcopy(IN_ORDER)
    assert read_messages(IN_ORDER) == before
    given = [{"role": "developer", "content": [{"type": "text", "text": "a"}], "name": None}]
    before = copy.deepcopy(given)
    read_messages(given)
    assert given == before


@pytest.mark.parametrize(("given", "expected"), [
    ({"role": "developer", "content": "d"}, {"role": "system", "content": "d"}),
    ({"role": "user", "content": None}, {"role": "user", "content": ""}),
    (
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "ab"},
    ),
    (
        {"role": "user", "content": [{"type": "text", "text": "a", "image": None}], "tool_calls": None},
        {"role": "user", "content": "a"},
    ),
    ({"role": "user", "content": []}, {"role": "user", "content": ""}),
])  # fmt: skip
def test_content_is_text(given, expected):
    assert read(given) == expected


@pytest.mark.parametrize(("arguments", "expected"), [
    ('{"a": 1, "b": null}', {"a": 1, "b": None}),
    ({"a": 1, "b": None, "c": [{"d": None, "e": None}]}, {"a": 1, "c": [{}]}),
    ("", {}),
    (None, {}),
    ('{"a": ', '{"a": '),
    ("[" * 100_000, "[" * 100_000),
])  # fmt: skip
def test_arguments_of_calls_are_mappings(arguments, expected):
    function = {"name": "add", "arguments": arguments}
    for call in ({"id": None, "type": "function", "function": function}, function):
        (found,) = read({"role": "assistant", "content": None, "tool_calls": [call]})["tool_calls"]
        assert found.get("function", found) == {"name": "add", "arguments": expected}
        assert "id" not in found


def test_a_tools_name_is_that_of_its_call():
    calls = {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "c1"}]}
    answer = {"role": "tool", "tool_call_id": "c1", "content": "3"}
    assert read(answer, calls) == {**answer, "name": "add"}
    assert read({**answer, "name": "other"}, calls)["name"] == "other"
    assert read({**answer, "tool_call_id": "c2"}, calls)["name"] == "tool"


@pytest.mark.parametrize(("message", "named"), [
    ({"content": "x"}, "role"),
    ({"role": None, "content": "x"}, "role"),
    ({"role": 3, "content": "x"}, "role"),
    ("user", "role"),
    ({"role": "user", "content": 5}, "content"),
    ({"role": "user", "content": ["a"]}, "content"),
    ({"role": "user", "content": [{"type": "image"}, {"type": "video"}]}, "video"),
    ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}, "image_url"),
    ({"role": "user", "content": [{"type": "text", "text": None}]}, "content"),
    ({"role": "assistant", "content": "", "tool_calls": ["add"]}, "tool_calls"),
    ({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": None}}]}, "tool_calls"),
])  # fmt: skip
def test_what_no_template_can_read_is_refused(message, named):
    with pytest.raises(ValueError, match=named):
        read(message)


def test_a_prompt_must_leave_the_turn_to_the_model():
    check_turn("a text")
    check_turn(IN_ORDER[:2])
    with pytest.raises(ValueError, match="assistant"):
        check_turn(IN_ORDER[:3])


class Odd:
    def __str__(self):
        return "odd \ud800"


@pytest.mark.parametrize(("result", "expected"), [
    ("a\ud800", "a?"),
    ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
    ([{"type": "text", "text": "a"}, "b"], '[{"type": "text", "text": "a"}, "b"]'),
    (["é", 1, None, True], '["é", 1, null, true]'),
    ([], "[]"),
    ({"a": [1.5]}, '{"a": [1.5]}'),
    (7, "7"),
    (None, "null"),
    (Decimal("1.10"), "1.10"),
    (np.float32(0.1), "0.1"),
    (np.bool_(True), "True"),
    ({"at": Odd}, str({"at": Odd})),
])  # fmt: skip
def test_results_are_text(result, expected):
    assert result_text("x", result) == expected


@pytest.mark.parametrize("result", [{1, }, b"b", Odd(), iter([]), {"at": object()}])  # fmt: skip
def test_other_results_are_refused_by_name(result):
    with pytest.raises(EnvironmentContractError, match=f"^The tool returned a {type(result).__name__};"):
        result_text("The tool", result)


def test_a_text_block_beside_an_image_is_a_text_or_refused():
    image = {"type": "image", "image": object()}
    blocks = [{"type": "text", "text": "a", "image": None}, {**image, "text": None}]
    (read,) = read_messages([{"role": "user", "content": blocks}])
    assert read["content"] == [{"type": "text", "text": "a"}, image]
    with pytest.raises(ValueError, match="`content`"):
        read_messages([{"role": "user", "content": [{"type": "text", "text": None}, image]}])
