"""A tiny model that really calls tools: it has memorised a few conversations, token by token."""

import copy
import json
from typing import Any

import torch
from transformers import Qwen2ForCausalLM
from trl.chat_template_utils import qwen3_template

from trl_stppo.models.small import tiny_config, tiny_tokenizer

# Qwen's form of a conversation with tools, without the schemas, which would only make rows long.
TEMPLATE = """
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}
{%- for call in message.get('tool_calls') or [] %}
<tool_call>
{"name": "{{ call['function']['name'] }}", "arguments": {{ call['function']['arguments'] | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""


def call(name: str, **arguments: Any) -> str:
    """A tool call as Qwen2.5 writes it."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def tool_tokenizer(texts: list[str]) -> Any:
    """A tokenizer with Qwen2.5's chat template."""
    markers = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    tokenizer = tiny_tokenizer(texts * 4, vocab_size=600, markers=markers)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = qwen3_template
    return tokenizer


def memorising_model(
    tokenizer: Any, rows: list[list[int]], masks: list[list[bool]], *, steps: int = 300
) -> Qwen2ForCausalLM:
    """A float64 model whose greedy choice is the given one at every masked token.

    `rows` are token ids of whole episodes, prompts included; it trains for `steps` at most.
    """
    torch.manual_seed(0)
    config = tiny_config(tokenizer, hidden_size=64, intermediate_size=128)
    model = Qwen2ForCausalLM(config)
    width = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
    said = torch.tensor([mask + [False] * (width - len(mask)) for mask in masks])
    labels = ids.masked_fill(~said, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 6e-3 * min(1.0, (step + 1) / 20)
        out = model(input_ids=ids, labels=labels)
        right = (out.logits.argmax(-1)[:, :-1] == ids[:, 1:])[said[:, 1:]]
        if bool(right.all()) and out.loss.item() < 0.05:
            break
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    assert bool(right.all()), f"{int((~right).sum())} tokens are not learnt"
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return copy.deepcopy(model).double()
