"""Which turns without a tool call are valid, in the formats that TRL reads."""

import re
from functools import cache
from pathlib import Path

import pytest
import trl
from trl.chat_template_utils import add_response_schema

from trl_stppo.models.small import tiny_tokenizer
from trl_stppo.rollout.chat import ChatRenderer
from trl_stppo.rollout.tool_driver import is_valid
from trl_stppo.trainer._trl import read_message

# Template -> the end of its turns, answers, and turns that are neither an answer nor a call.
TURNS = {
    "qwen3": (
        "<|im_end|>",
        ["It is 5.", "<think>\nI need no <tool_call>.\n</think>\n\nIt is 5.", ""],
        ['<tool_call>\n{"name": \n</tool_call>', "<tool_call>", "<think>\nIt never ends."],
    ),
    "qwen3_5_think": (
        "<|im_end|>",
        ["Hm.\n</think>\n\nIt is 5."],
        ['</think>\n\n<tool_call>\n{"name": "f"}\n</tool_call>', "It never ends."],
    ),
    "llama3_1": ("<|eot_id|>", ["It is 5."], ['{"name": "f", "parameters": {"x": }']),
    "gptoss": (
        "<|return|>",
        ["<|channel|>final<|message|>It is 5."],
        ['to=functions.f<|channel|>commentary json<|message|>{"x":<|call|>', "of of of"],
    ),
    "lfm2_2_5": ("<|im_end|>", ["It is 5."], ["<|tool_call_start|>f<|tool_call_end|>"]),
    "gemma4": (
        "<turn|>",
        ["It is 5."],
        ['<|tool_call>call:f{x:<|"|>a', "<|tool_call>f<tool_call|>"],
    ),
}
CASES = [
    (name, turn, valid)
    for name, (_, *kinds) in TURNS.items()
    for valid, turns in zip((True, False), kinds, strict=True)
    for turn in turns
]


@cache
def renderer_of(name):
    """A renderer with a template, and the tokens before a turn."""
    text = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    tokenizer = tiny_tokenizer([text[:3000]] * 3, vocab_size=800)
    tags = {*re.findall(r"<\|[a-z_]+\|>|<\|tool_call>|<tool_call\|>", text), TURNS[name][0]}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(tags)})
    tokenizer.chat_template, tokenizer.eos_token = text, TURNS[name][0]
    add_response_schema(tokenizer)
    renderer = ChatRenderer(tokenizer, [tokenizer.eos_token_id])
    return renderer, renderer.prompt_ids([{"role": "user", "content": "?"}])


@pytest.mark.parametrize(("name", "turn", "valid"), CASES)
def test_an_answer_can_be_read_and_has_no_broken_call(name, turn, valid):
    renderer, before = renderer_of(name)
    ids = [*renderer.tokenizer.encode(turn), renderer.tokenizer.eos_token_id]
    message = read_message(renderer, ids, before, [])
    assert "tool_calls" not in message
    assert is_valid(renderer, message, ids) is valid


def test_without_a_format_a_call_in_the_text_is_the_agents():
    tokenizer = tiny_tokenizer(["<tool_call>5"] * 3, vocab_size=300)
    renderer = ChatRenderer(tokenizer, [tokenizer.eos_token_id])
    ids = [*tokenizer.encode("<tool_call>5"), tokenizer.eos_token_id]
    assert is_valid(renderer, read_message(renderer, ids, [], []), ids) is True
