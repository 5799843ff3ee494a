"""What follows a turn is what each real chat template writes there, however the turn ended."""

import datetime

import pytest
from transformers.utils import chat_template_utils

from tests.kit.template_kit import (
    CONVERSATIONS,
    HEADERS,
    byte_tokenizer,
    read_template,
    renderer_of,
    said,
    templates,
    text_of,
    turns,
)
from trl_stppo.rollout.chat import ChatRenderer


@pytest.mark.parametrize("name", templates())
def test_what_follows_a_turn_is_what_the_template_writes_there(name):
    template = read_template(name)
    tokenizer = template.tokenizer
    ends = tokenizer.convert_tokens_to_ids(list(template.ends))
    for kind in CONVERSATIONS:
        renderer = renderer_of(template, kind)
        for turn in turns(renderer, kind, template.ends):
            rest = renderer.control.text_ids(turn.whole[turn.end :])
            cut = renderer.suffix_ids(turn.messages, last=tokenizer.convert_tokens_to_ids("G"))
            assert tokenizer.decode(cut) == turn.whole[turn.end :]
            # Before its end a policy of `cohere2` writes a tag of its own.
            start = 1 if tokenizer.convert_ids_to_tokens(rest[0]) == "<|END_RESPONSE|>" else 0
            repeats = tokenizer.convert_ids_to_tokens(rest[start]) in HEADERS
            for end in ends:
                after = rest[start:] if repeats and end != rest[start] else rest[start + 1 :]
                found = renderer.suffix_ids(turn.messages, last=end)
                assert tokenizer.decode(found) == tokenizer.decode(after), (kind, end)


def test_a_date_in_the_template_may_change_within_an_episode(monkeypatch):
    class Clock(datetime.datetime):
        day = 1

        @classmethod
        def now(cls, tz=None):
            return datetime.datetime(2026, 12, cls.day)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    renderer = renderer_of(read_template("llama3_2"), "text")
    message = [said("user", "A door.")]
    assert "01 Dec 2026" in text_of(renderer, message)
    before = renderer.suffix_ids(message, last=renderer.tokenizer.eos_token_id)
    Clock.day = 2
    assert "02 Dec 2026" in text_of(renderer, message)
    assert renderer.suffix_ids(message, last=renderer.tokenizer.eos_token_id) == before


def test_an_opening_after_a_system_prompt_reaches_the_policy():
    """Gemma leaves out a system message that no user message follows."""
    template = read_template("gemma3")
    renderer = renderer_of(template, "text")
    ids = renderer.prompt_ids([said("system", "You open doors.")], opening="Open door 7.")
    text = template.tokenizer.decode(ids)
    assert "You open doors." in text
    assert "Open door 7.<end_of_turn>" in text


def test_tags_that_are_special_tokens_reach_the_environment():
    tokenizer = byte_tokenizer("<|im_start|><think><|im_end|>", ("<|im_end|>", "<|endoftext|>"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    renderer = ChatRenderer(tokenizer, [tokenizer.eos_token_id])
    turn = "<bos><think><answer>7</answer><|im_end|><|endoftext|>"
    assert renderer.decode_action(tokenizer(turn)["input_ids"]) == "<answer>7</answer>"
    assert renderer.decode_action(tokenizer("<|im_start|>7<|im_end|>")["input_ids"]) == "7"
