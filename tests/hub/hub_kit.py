"""Small runs to push, and what one asks of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.kit.builders import LIMITS, TEXT, build, prompts
from tests.kit.fakes import char_tokenizer, tiny_policy
from trl_stppo import STPPOTrainer

REPO = "me/agent"


def letters(count: int = 8) -> Any:
    """Rows with a letter that `CountEnv` wants to see."""
    return prompts(count, letter=list("abcdefgh")[:count])


def run(folder: Path, trainer_class: type = STPPOTrainer, **options: Any) -> Any:
    """A trainer on `CountEnv` that evaluates greedily; `arguments` as in `build`."""
    arguments = {**TEXT, "train_dataset": letters(), **options.pop("arguments", {})}
    settings = {**LIMITS, "hub_model_id": REPO, "max_turn_tokens": 4}
    settings |= {"eval_generation_kwargs": {"temperature": 0.0}}
    return build(folder, trainer_class, arguments=arguments, **{**settings, **options})


def saved_base(folder: Path, seed: int = 0) -> str:
    """A small model on the disk, for adapters to belong on."""
    tokenizer = char_tokenizer()
    tiny_policy(tokenizer, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def values(trainer: Any) -> Tensor:
    """What the critic says of a fixed row."""
    ids = torch.arange(5, 25).unsqueeze(0)
    with torch.no_grad(), trainer.critic.active():
        return trainer.critic.values(ids, torch.ones_like(ids), 8)


def logits(model: Any) -> Tensor:
    """What a policy says of the same row."""
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(5, 25).unsqueeze(0)).logits
