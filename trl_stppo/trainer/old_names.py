"""Arguments of TRL's former PPOTrainer, and the names that they have today."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ..wording import did_you_mean

# Argument of one of TRL's versions -> the one of today.
ARGUMENTS = {
    "config": "args",
    "policy": "model",
    "ref_policy": "ref_model",
    "tokenizer": "processing_class",
    "dataset": "train_dataset",
    "optimizer": "optimizers=(optimizer, None)",
}


def check_arguments(kind: type, model: Any, unknown: Mapping[str, Any]) -> None:
    """Refuse arguments that a trainer does not have, and a policy that is missing."""
    if not unknown:
        if model is None:
            raise TypeError(
                f"{kind.__name__} needs a `model`: the policy, by name or as an instance."
            )
        return
    known = [name for name in inspect.signature(kind).parameters if name != "unknown"]
    said = [
        f"`{name}` (TRL's former name) is `{ARGUMENTS[name]}`"
        if name in ARGUMENTS
        else f"`{name}` is none of its arguments. {did_you_mean(name, known) or ''}".rstrip()
        for name in unknown
    ]
    raise TypeError(f"{kind.__name__} was given arguments that it does not have: {'; '.join(said)}")
