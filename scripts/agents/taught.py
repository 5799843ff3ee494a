"""A tiny model that has memorised the answers to a few calls, and an agent's training on it."""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen2ForCausalLM
from trl.chat_template_utils import qwen3_template

from trl_stppo import STPPOConfig, STPPOTrainer
from trl_stppo.models.small import tiny_config, tiny_tokenizer

# Qwen's form of a conversation with tools; of their schemas only the names, which keeps rows short.
TEMPLATE = """
{%- if tools -%}
<|im_start|>system
tools:{% for tool in tools %} {{ tool['function']['name'] }}{% endfor %}<|im_end|>
{% endif -%}
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

MAX_TURNS = 4
# One call of the policy: messages and tools as chat templates take them, and the text to answer.
Call = tuple[list[dict[str, Any]], list[dict[str, Any]], str]


def taught(calls: list[Call], *, loss: float = 0.003, steps: int = 300) -> tuple[Any, Any]:
    """Train a model and its tokenizer on the answers to calls, down to a mean loss per token."""
    torch.manual_seed(0)
    texts = [message["content"] for messages, *_ in calls for message in messages]
    texts += [answer for *_, answer in calls] + ["system user assistant tool tools:"]
    markers = ["<tool_call>", "</tool_call>"]
    tokenizer = tiny_tokenizer(texts * 4, vocab_size=2000, markers=markers)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"})
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = qwen3_template
    prompts = [
        tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, return_dict=False
        )
        for messages, tools, _ in calls
    ]
    answers = [[*tokenizer(answer).input_ids, tokenizer.eos_token_id] for *_, answer in calls]
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    width = max(map(len, rows))
    labels = torch.full((len(rows), width), -100)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    for i, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        ids[i, : len(row)] = torch.tensor(row)
        labels[i, len(row) - len(answer) : len(row)] = torch.tensor(answer)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": width + 1024}
    model = Qwen2ForCausalLM(tiny_config(tokenizer, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 6e-3 * min(1.0, (step + 1) / 20)
        now = model(input_ids=ids, labels=labels).loss
        if now.item() < loss:
            break
        optimizer.zero_grad()
        now.backward()
        optimizer.step()
    else:
        print(f"The tiny model has not reached its target, a loss of {loss}, within {steps} steps.")
    print(f"The last loss of the tiny model was {now.item():.3f}.")
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model.eval(), tokenizer


def tool_call(name: str, arguments: str) -> str:
    """A call as the template renders it; `arguments` is JSON."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def sums(system: str) -> tuple[list[dict[str, Any]], list[Call]]:
    """Rows with small sums, and the calls of an agent that has a tool `add` for them."""
    tools, rows, calls = [{"type": "function", "function": {"name": "add"}}], [], []
    for a, b in ((2, 3), (4, 5), (7, 1), (6, 2)):
        arguments = {"a": a, "b": b}
        asked = [{"role": "user", "content": f"What is {a} plus {b}?"}]
        rows.append({"prompt": asked, "answer": str(a + b)})
        messages = [{"role": "system", "content": system}, *asked]
        calls.append((messages, tools, tool_call("add", json.dumps(arguments))))
        done = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        messages = [
            *messages,
            {"role": "assistant", "content": "", "tool_calls": [done]},
            {"role": "tool", "content": str(a + b)},
        ]
        calls.append((messages, tools, f"It is {a + b}."))
    return rows, calls


def train(agent: Any, system: str, about: str, output_dir: str) -> None:
    """Train an agent on sums, as the command line has it; `about` is its help."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--model", help="Name or folder of a model; a tiny taught one by default.")
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--output_dir", default=output_dir)
    options = parser.parse_args()
    rows, calls = sums(system)
    tiny = options.model is None
    model, tokenizer = taught(calls, loss=0.08) if tiny else (options.model, None)
    args = STPPOConfig(
        output_dir=options.output_dir, max_steps=options.updates, num_mini_batches=1,
        num_ppo_epochs=1, per_device_train_batch_size=32, gradient_accumulation_steps=1,
        logging_steps=1, learning_rate=6e-4 if tiny else 1e-6, max_turns=MAX_TURNS,
        max_turn_tokens=64 if tiny else 512,
        max_completion_length=512 if tiny else 4096, report_to="none", bf16=not tiny, use_cpu=tiny,
    )  # fmt: skip
    trainer = STPPOTrainer(
        model=model, processing_class=tokenizer, args=args, agent=agent,
        train_dataset=Dataset.from_list(rows * 8),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
