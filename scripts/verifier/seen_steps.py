"""Scores single steps by what a vision-language model sees: a function for `turn_reward_funcs`.

The model reads the task, the newest screenshot before the step, and the step. The score is the share of the
label "yes" among two labels. Source: GUI-Shepherd, arXiv:2509.23738.

    trainer = STPPOTrainer(..., turn_reward_funcs=[seen_scores(model, processor)])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

TEMPLATE = """The task of an agent:
{}

The agent sees this screen, and its next step is:
{}

Does this step bring the agent closer to solving the task? Answer with {} or {} alone.\n"""


def seen_scores(
    model: Any, processor: Any, labels: tuple[str, str] = ("yes", "no")
) -> Callable[..., list[float]]:
    """Return a function that scores each step by P(yes) / (P(yes) + P(no)) of the model's answer.

    Args:
        model: a vision-language model, on its device; it is not trained.
        processor: its processor, with a chat template.
        labels: words for a good and a bad step, of which the first tokens count.
    """
    encode = processor.tokenizer.encode
    yes, no = (encode(word, add_special_tokens=False)[0] for word in labels)

    def question(before: list[dict[str, Any]], step: list[dict[str, Any]]) -> list[dict[str, Any]]:
        task = next(_text(message) for message in before if message["role"] == "user")
        blocks = (block for message in before for block in _blocks(message))
        seen = [block for block in blocks if block["type"] == "image"]
        text = TEMPLATE.format(task, "".join(map(_text, step)), *labels)
        return [{"role": "user", "content": [*seen[-1:], {"type": "text", "text": text}]}]

    @torch.inference_mode()
    def scores(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        values = list[float]()
        for before, step in zip(prompts, completions, strict=True):
            inputs = processor.apply_chat_template(
                question(before, step), add_generation_prompt=True, tokenize=True,
                return_dict=True, return_tensors="pt",
            ).to(model.device, model.dtype)  # fmt: skip
            logits = model(**inputs).logits[0, -1].float()
            values.append(float(torch.sigmoid(logits[yes] - logits[no])))
        return values

    return scores


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content") or ""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text(message: dict[str, Any]) -> str:
    text = "".join(b["text"] for b in _blocks(message) if b["type"] == "text")
    return text + str(message.get("tool_calls") or "")
