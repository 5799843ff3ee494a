"""What tools return, and calls that no parser survives, with TRL's own templates."""

import functools
import re
from pathlib import Path

import pytest
import torch
import trl
from datasets import Dataset
from transformers import Qwen2ForCausalLM

from tests.kit.builders import Kept, build, prompts
from trl_stppo.models.small import tiny_config, tiny_tokenizer
from trl_stppo.trainer.loop.sampler import TurnSampler

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
CALL = '<tool_call>\n{"name": "search", "arguments": {"q": "x"}}\n</tool_call><|im_end|>'
XML = (
    "</think>\n\n<tool_call>\n<function=search>\n<parameter=q>\nx\n</parameter>\n</function>\n</tool_call>"
    "<|im_end|>"
)


def search(q: str) -> list:
    """Search.\n\nArgs:\n    q: query."""
    return ["passage one", {"title": "two"}]


def blocks(q: str) -> list:
    """Search.\n\nArgs:\n    q: query."""
    return [{"type": "text", "text": "passage one"}]


async def _search(q: str) -> str:
    """Search.\n\nArgs:\n    q: query."""
    return f"found {q}"


@functools.wraps(_search)
def decorated(*args, **kwargs):
    return _search(*args, **kwargs)


decorated.__name__ = "search"


def tokenizer_of(template):
    text = (TEMPLATES / f"{template}.jinja").read_text()
    tokenizer = tiny_tokenizer([text[:5000]] * 3, vocab_size=700)
    tags = {*re.findall(r"<\|[a-z_]+\|>", text), "<|endoftext|>"}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(tags)})
    tokenizer.chat_template, tokenizer.eos_token = text, "<|im_end|>"
    return tokenizer


def played(folder, monkeypatch, template, says, tool=None, rows=None, arguments=(), **options):
    """The episodes of a model that says the same in every turn."""
    tokenizer = tokenizer_of(template)

    class Scripted(Kept):
        def _generate_single_turn(self, ids, *rest):
            return [tokenizer.encode(says) for _ in ids], None

    monkeypatch.setattr(TurnSampler, "why_not_cached", lambda self: "A script answers.")
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 8192}
    given = {
        "processing_class": tokenizer, "model": Qwen2ForCausalLM(tiny_config(tokenizer, **small)),
        "train_dataset": rows or prompts(4), "tools": tool and [tool],
        "reward_funcs": lambda completions, **kwargs: [0.0] * len(completions),
    }  # fmt: skip
    sizes = {"max_completion_length": 4000, "max_steps": 1, "per_device_train_batch_size": 2}
    trainer = build(folder, Scripted, arguments={**given, **dict(arguments)}, **sizes, **options)
    trainer.train()
    return trainer.episodes, tokenizer


@pytest.mark.parametrize(("template", "says", "tool", "shown"), [
    ("qwen3", CALL, search, '["passage one", {"title": "two"}]'),
    ("qwen3", CALL, decorated, "found x"),
    ("qwen3_5_think", XML, blocks, "passage one"),
])  # fmt: skip
def test_the_model_reads_what_a_tool_gives(template, says, tool, shown, tmp_path, monkeypatch):
    says = says.replace("search", tool.__name__)
    episodes, tokenizer = played(tmp_path, monkeypatch, template, says, tool, max_turns=2)
    for episode in episodes:
        assert [m["content"] for m in episode.messages if m["role"] == "tool"] == [shown]
        assert f"<tool_response>\n{shown}\n</tool_response>" in tokenizer.decode(episode.ids)


@pytest.mark.long
@pytest.mark.parametrize(("arguments", "reason"), [
    ("[" * 1100, "no_action"),
    ('{"q": ' + "[" * 900 + "]" * 900 + "}", "no_action"),
    ('{"q": ' + "[" * 100 + "]" * 100 + "}", "no_action"),
    ('{"q": ' + "[" * 20 + "]" * 20 + "}", "max_turns"),
])  # fmt: skip
def test_a_call_of_brackets_is_plain_text(arguments, reason, tmp_path, monkeypatch):
    says = f'<tool_call>\n{{"name": "search", "arguments": {arguments}}}\n</tool_call><|im_end|>'
    options = {"max_turns": 2, "trace_episodes": 4, "save_strategy": "steps", "save_steps": 1}
    episodes, _ = played(tmp_path, monkeypatch, "qwen3", says, search, **options)
    for episode in episodes:
        assert str(episode.stop_reason) == reason
        assert ("tool_calls" in episode.messages[0]) == (reason == "max_turns")
        assert reason == "max_turns" or arguments in episode.messages[0]["content"]


ADD = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
LOG = [
    {"role": "developer", "content": "Be exact."},
    {"role": "user", "content": "1?"},
    {"role": "assistant", "content": None, "tool_calls": [ADD]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "user", "content": "Sure?"},
]  # fmt: skip
BLOCKS = [{"role": "user", "content": [{"type": "text", "text": "What is 2 + 2?"}]}]


@pytest.mark.long
@pytest.mark.parametrize("template", ["qwen3", "qwen2_5", "qwen3_5_think", "llama3_2"])
@pytest.mark.parametrize(("prompt", "shown"), [
    (BLOCKS, ["What is 2 + 2?"]),
    (LOG[1:], ["1?", "3", "Sure?"]),
    (LOG, ["Be exact.", "1?", "3", "Sure?"]),
])  # fmt: skip
def test_rows_in_the_form_of_openai_are_read(template, prompt, shown, tmp_path, monkeypatch):
    others = {"prompt": [{"role": "user", "content": prompt[0]["content"], "name": "me"}]}
    rows = Dataset.from_list([{"prompt": prompt}, others] * 4)
    assert "name" in rows[0]["prompt"][0]
    episodes, tokenizer = played(tmp_path, monkeypatch, template, "4<|im_end|>", rows=rows)
    texts = {tokenizer.decode(episode.prompt_ids) for episode in episodes}
    (text,) = [text for text in texts if all(part in text for part in shown)]
    assert "None" not in text
    assert "{'type'" not in text
    if "tool_calls" in str(prompt):
        compact = text.replace(" ", "")
        assert (
            '"arguments":{"a":1}' in compact
            or "<parameter=a>\n1\n" in text
            or '"parameters":{"a":1}' in compact
        )
