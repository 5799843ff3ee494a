"""Worker of `update.py`: AgileRL's LLMPPO, run by an interpreter that has that package.

Actor, reference and critic are three adapters of one backbone; `learn` gets the fixed episodes. Its
passes without gradient (values, old and reference log-probabilities) count as before the update, as
everywhere here.
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from _update_probe import Probe, read_episodes, read_job, send, trainable
from agilerl.algorithms import LLMPPO
from agilerl.algorithms.core import base
from peft import LoraConfig, TaskType
from transformers import AutoTokenizer


def experiences(
    episodes: list[dict[str, Any]],
) -> tuple[tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor], torch.Tensor]:
    """Ids, action masks and turn rewards of every episode, and turn numbers [B, L - 1]."""
    width = max(len(e["prompt_ids"]) + len(e["completion_ids"]) for e in episodes)
    turns = max(len(e["turn_spans"]) for e in episodes)
    numbers = torch.full((len(episodes), width - 1), -1)
    rewards = torch.zeros(len(episodes), turns)
    ids, masks = [], []
    for row, episode in enumerate(episodes):
        prompt, completion = episode["prompt_ids"], episode["completion_ids"]
        ids.append(torch.tensor([prompt + completion]))
        for turn, (start, end) in enumerate(episode["turn_spans"]):
            first = len(prompt) - 1
            numbers[row, first + start : first + end] = turn
        masks.append(numbers[row : row + 1, : ids[-1].size(1) - 1] >= 0)
        rewards[row, -1] = float(row % 3)
    return (ids, masks, rewards), numbers


def _no_triton(**_: Any) -> None:
    """Liger's layers need a GPU; this is how AgileRL is told to keep the stock ones."""
    raise KeyError("no Triton on the CPU")


def build(job: dict[str, Any]) -> Any:
    """The agent."""
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    return LLMPPO(
        pad_token_id=tokenizer.pad_token_id,
        pad_token=tokenizer.pad_token,
        model_name=job["model"],
        model_config={"dtype": getattr(torch, job["dtype"])},
        lora_config=LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type=TaskType.CAUSAL_LM
        ),
        batch_size=job["num_episodes"],
        micro_batch_size_per_gpu=job["micro"],
        mini_batch_size=job["num_episodes"],
        update_epochs=1,
        max_model_len=job["longest"],
        max_output_tokens=job["longest"],
        importance_sampling_level="turn",
        gradient_checkpointing=job["checkpointing"],
        use_liger_loss=False,
        device=job["device"],
    )


def main() -> None:
    """Run the job given on the command line, and send what was measured."""
    job = read_job()
    transformers.logging.set_verbosity_error()
    if job["device"] == "cpu":
        base._apply_liger_kernel_to_instance = _no_triton
    probe = Probe(job)
    agent = build(job)

    def measured(*_: Any) -> None:
        if torch.is_grad_enabled():
            probe.begin()

    agent.actor.register_forward_pre_hook(measured)
    batch, numbers = experiences(read_episodes(job))
    for _ in range(job["updates"]):
        figures = agent.learn(batch, turn_ids=numbers)
    phases = {k: v for k, v in figures.items() if k.startswith("learn_phase")}
    send(
        {
            "done": {
                "updates": probe.updates,
                "trainable": trainable(agent.actor.parameters()),
                "own_phases": phases,
            }
        }
    )


if __name__ == "__main__":
    main()
