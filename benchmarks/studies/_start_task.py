"""What the study of beginnings trains: an agent with a tool and a graded reward.

The prompt names three rooms. The tool `go` visits one, and its answer is right or wrong; the reward is the
share of the plan that was visited in order within four calls. A turn is one call in Qwen's JSON form: 22
tokens, of which one decides.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2ForCausalLM, set_seed
from trl.chat_template_utils import qwen3_template

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "agents"))
from taught import TEMPLATE

from trl_stppo.models.small import tiny_config, tiny_tokenizer

ROOMS = ("attic", "cellar", "garden", "hall", "kitchen", "study")
PLAN, CALLS = 3, 4
CARE = 0.4  # of the player who is imitated at the end
TOOLS = [{"type": "function", "function": {"name": "go"}}]


class House:
    """A tool environment of TRL's form: its public methods are the tools."""

    def reset(self, *, plan: str, **row: Any) -> None:
        """Start at the first room of the plan."""
        self._left, self.visited = plan.split(), 0

    def go(self, room: str) -> str:
        """Go to a room.

        Args:
            room: its name.
        """
        if not self._left or room != self._left[0]:
            return "wrong"
        self._left.pop(0)
        self.visited += 1
        return "right" if self._left else "done"


def visited(environments: list[House], **others: Any) -> list[float]:
    """The share of the plan that was visited: the reward function."""
    return [each.visited / PLAN for each in environments]


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Plans of rooms, which may repeat."""
    dice, made = random.Random(seed), []
    for _ in range(count):
        plan = " ".join(dice.choices(ROOMS, k=PLAN))
        made.append({"prompt": [{"role": "user", "content": f"visit {plan}"}], "plan": plan})
    return made


def demonstration(row: dict[str, Any], care: float, dice: random.Random) -> list[dict[str, Any]]:
    """An episode of a player who follows the plan in this share of the calls."""
    house, messages = House(), list(row["prompt"])
    house.reset(**row)
    for _ in range(CALLS):
        room = house._left[0] if dice.random() < care else dice.choice(ROOMS)
        call = {"name": "go", "arguments": {"room": room}}
        calls = [{"type": "function", "function": call}]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages.append({"role": "tool", "content": house.go(room)})
        if not house._left:
            break
    return [*messages, {"role": "assistant", "content": "done"}]


def build_start_agent(folder: Path, seed: int, steps: int = 600) -> None:
    """Teach an agent, unless it is there; two minutes.

    Careful players come first: that calls follow the plan is found sooner without noise.
    """
    if folder.is_dir():
        return
    set_seed(seed)
    dice = random.Random(seed)
    texts = ["system user assistant tool tools: go right wrong done visit " + " ".join(ROOMS)]
    texts.append(json.dumps({"name": "go", "arguments": {"room": "hall"}}))
    markers = ["<tool_call>", "</tool_call>", *(f" {x}" for x in ROOMS), *(f'"{x}"' for x in ROOMS)]
    tokenizer = tiny_tokenizer(texts * 50, vocab_size=400, markers=markers)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"})
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, qwen3_template
    model = Qwen2ForCausalLM(tiny_config(tokenizer, hidden_size=96, intermediate_size=256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    plans = rows(32 * steps, seed)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)
        care = 1.0 if step < 0.6 * steps else CARE
        batch = [demonstration(row, care, dice) for row in plans[32 * step : 32 * (step + 1)]]
        ids, labels = _tensors(tokenizer, batch)
        loss = model(input_ids=ids, labels=labels).loss  # padding is behind the text
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    staging = folder.with_name(folder.name + ".incomplete")
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    staging.rename(folder)


def _tensors(tokenizer: Any, episodes: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, and labels of the agent's own tokens."""
    head = tokenizer.encode("<|im_start|>assistant\n")
    texts = [tokenizer.apply_chat_template(e, tools=TOOLS, return_dict=False) for e in episodes]
    ids = torch.full((len(texts), max(map(len, texts))), tokenizer.pad_token_id)
    labels = torch.full_like(ids, -100)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
        for start in range(len(text)):
            if text[start : start + len(head)] == head:
                first = start + len(head)
                last = text.index(tokenizer.eos_token_id, first) + 1
                labels[row, first:last] = ids[row, first:last]
    return ids, labels
