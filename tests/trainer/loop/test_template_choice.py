"""Which chat template renders a row's episode, and with which settings, from its start to its end."""

import logging

import pytest
from datasets import Dataset

from tests.kit.builders import prompts
from tests.trainer.loop.test_tool_results import CALL, played, search, tokenizer_of
from trl_stppo.rollout.chat import ChatRenderer
from trl_stppo.trainer.planning.plan import RolloutPlan, fitted_tokenizer

USER = [{"role": "user", "content": "Hi."}]
BARE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THOUGHT = "<think>\n\n</think>"


def named(template):
    tokenizer = tokenizer_of(template)
    tokenizer.chat_template = {"default": BARE, "tool_use": tokenizer.chat_template}
    return tokenizer


@pytest.fixture
def several(monkeypatch):
    monkeypatch.setattr("tests.trainer.loop.test_tool_results.tokenizer_of", named)


def test_tools_are_rendered_by_the_template_for_tools(several, tmp_path, monkeypatch):
    episodes, tokenizer = played(tmp_path, monkeypatch, "qwen2_5", CALL, search, max_turns=2)
    text = tokenizer.decode(episodes[0].prompt_ids + episodes[0].ids)
    assert '"name": "search"' in text
    assert "<tool_response>\n" in text


def test_an_agents_results_are_rendered_by_the_template_of_its_tools(several, tmp_path, monkeypatch):
    spec = {"type": "function", "function": {"name": "search", "description": "", "parameters": {
        "type": "object", "properties": {"q": {"type": "string"}}}}}  # fmt: skip

    async def agent(client, row):
        said = [*USER]
        for _ in range(2):
            answer = await client.chat.completions.create(model="policy", messages=said, tools=[spec])
            message = answer.choices[0].message
            said.append(message.model_dump(exclude_none=True))
            calls = message.tool_calls or []
            said += [{"role": "tool", "tool_call_id": c.id, "content": "found"} for c in calls]
        return 1.0

    options = {"max_turns": 3, "arguments": {"agent": agent, "tools": None, "reward_funcs": None}}
    episodes, tokenizer = played(tmp_path, monkeypatch, "qwen2_5", CALL, **options)
    assert "<tool_response>\nfound\n</tool_response>" in tokenizer.decode(episodes[0].ids)


def test_without_tools_the_default_is_the_template(several, tmp_path, monkeypatch):
    episodes, tokenizer = played(tmp_path, monkeypatch, "qwen2_5", "x<|im_end|>")
    assert tokenizer.decode(episodes[0].prompt_ids).startswith("<|im_start|>user\nsay")


def test_the_users_tokenizer_keeps_its_templates():
    tokenizer = named("qwen2_5")
    assert fitted_tokenizer(tokenizer, RolloutPlan()).chat_template == BARE
    assert isinstance(tokenizer.chat_template, dict)
    tokenizer.chat_template = BARE
    assert fitted_tokenizer(tokenizer, RolloutPlan()) is tokenizer


def test_a_rows_settings_hold_for_its_whole_episode(tmp_path, monkeypatch):
    rows = Dataset.from_list([
        {"prompt": [{"role": "user", "content": f"say {i}"}], "chat_template_kwargs": own}
        for i, own in enumerate(({"enable_thinking": False}, None, {"other": 1}) * 2)
    ])  # fmt: skip
    episodes, tokenizer = played(tmp_path, monkeypatch, "qwen3", CALL, search, rows, max_turns=2)
    seen = set()
    for episode in episodes:
        own = (episode.columns["chat_template_kwargs"] or {}).get("enable_thinking")
        seen.add(own)
        assert (THOUGHT in tokenizer.decode(episode.prompt_ids)) is (own is False)
        assert (THOUGHT in tokenizer.decode(episode.ids)) is (own is False)
    assert seen == {None, False}


def test_a_column_of_tools_is_said_to_have_no_effect_once(tmp_path, monkeypatch, caplog):
    rows = prompts(4, tools=[[{"name": "search"}]] * 4)
    with caplog.at_level(logging.WARNING):
        played(tmp_path, monkeypatch, "qwen2_5", "x<|im_end|>", rows=rows)
    said = [record.getMessage() for record in caplog.records if "`tools`" in record.getMessage()]
    assert len(said) == 1
    assert "`train_dataset`" in said[0]


def test_a_template_whose_control_tokens_the_tokenizer_splits_is_named(tmp_path, monkeypatch, caplog):
    def other(template):
        tokenizer = tokenizer_of(template)
        tokenizer.chat_template = tokenizer.chat_template.replace("<|im_start|>", "<start_of_turn>")
        return tokenizer

    monkeypatch.setattr("tests.trainer.loop.test_tool_results.tokenizer_of", other)
    with caplog.at_level(logging.WARNING):
        played(tmp_path, monkeypatch, "qwen2_5", "x<|im_end|>")
    (said,) = [r.getMessage() for r in caplog.records if "ordinary tokens" in r.getMessage()]
    assert "<start_of_turn>" in said
    assert "<|im_end|>" not in said
    tokenizer = tokenizer_of("qwen2_5")
    assert ChatRenderer(tokenizer, [tokenizer.eos_token_id]).control.split_tokens == []
