"""A house with a tool and a graded reward: turns of 22 tokens, of which one decides.

The prompt names three rooms. The tool `go` visits one, and its answer is right or wrong; the reward is the
share of the plan that was visited in order within four calls. A turn is one call in Qwen's JSON form.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from _task import Messages, Row, Task, taught
from transformers import Qwen2ForCausalLM, set_seed
from trl.chat_template_utils import qwen3_template

sys.path.append(str(Path(__file__).parents[3] / "scripts" / "agents"))
from taught import TEMPLATE

from trl_stppo.models.small import tiny_config, tiny_tokenizer

ROOMS = ("attic", "cellar", "garden", "hall", "kitchen", "study")
PLAN, CALLS = 3, 4
# The share of calls that follow the plan in the later demonstrations.
CARE = 0.4
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
    """Reward the share of the plan that was visited."""
    return [each.visited / PLAN for each in environments]


def rows(count: int, seed: int) -> list[Row]:
    """Make plans of rooms, which may repeat."""
    dice, made = random.Random(seed), []
    for _ in range(count):
        plan = " ".join(dice.choices(ROOMS, k=PLAN))
        made.append({"prompt": [{"role": "user", "content": f"visit {plan}"}], "plan": plan})
    return made


def demonstration(row: Row, care: float, dice: random.Random) -> Messages:
    """Play an episode that follows the plan in this share of the calls."""
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


def teach(number: int, steps: int) -> tuple[Any, Any]:
    """Teach the agent of a number: careful players first, so that it finds that calls follow the plan."""
    set_seed(number)
    dice = random.Random(number)
    texts = ["system user assistant tool tools: go right wrong done visit " + " ".join(ROOMS)]
    texts.append(json.dumps({"name": "go", "arguments": {"room": "hall"}}))
    markers = ["<tool_call>", "</tool_call>", *(f" {x}" for x in ROOMS), *(f'"{x}"' for x in ROOMS)]
    tokenizer = tiny_tokenizer(texts * 50, vocab_size=400, markers=markers)
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"})
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, qwen3_template
    model = Qwen2ForCausalLM(tiny_config(tokenizer, hidden_size=96, intermediate_size=256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    plans = rows(32 * steps, number)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)
        care = 1.0 if step < 0.6 * steps else CARE
        batch = [demonstration(row, care, dice) for row in plans[32 * step : 32 * (step + 1)]]
        ids, labels = _tensors(tokenizer, batch)
        # Padding is behind the text, so it needs no mask.
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model, tokenizer


def _tensors(tokenizer: Any, episodes: list[Messages]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids, and labels at the agent's own tokens."""
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


TASKS = {
    "house": Task(
        agent=taught("house", teach, steps=600),
        rows=lambda *_: rows(3000, seed=1),
        player={"environment_factory": House, "reward_funcs": visited},
        args={
            "learning_rate": 1e-3,
            "max_completion_length": 160,
            "max_tool_calling_iterations": CALLS,
        },
        episodes=64,
        rollouts=24,
        mini_batches=1,
        group=8,
        measure="reward",
        agents=3,
    )
}
