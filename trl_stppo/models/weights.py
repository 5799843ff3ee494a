"""Load weights from a folder into an existing model, even if their names on disk differ."""

from __future__ import annotations

import copy
import json
from functools import reduce
from pathlib import Path
from typing import Any

import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def load_converted(model: Any, folder: Path) -> bool:
    """Load a folder's weights if their form on disk differs from the model's.

    transformers saves the experts of a mixture one by one, as checkpoints on the Hub do, and keeps
    them in one tensor. Its trainer loads by name alone and skips names that it does not find.

    Returns:
        True if there were such weights; all weights are loaded then.
    """
    names = _names(folder)
    if not names or not hasattr(model, "config") or names <= set(model.state_dict()):
        return False
    # The widest dtype of all weights; copies into narrower ones round.
    dtype = reduce(torch.promote_types, (p.dtype for p in model.parameters()))
    # Loading writes the folder's name into the configuration.
    config = copy.deepcopy(model.config)
    saved = type(model).from_pretrained(folder, config=config, dtype=dtype)
    model.load_state_dict(saved.state_dict())
    return True


def _names(folder: Path) -> set[str]:
    """Return the names of the tensors in a folder, or an empty set without safetensors files."""
    from safetensors import safe_open

    if (folder / INDEX).is_file():
        return set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    if not (folder / SINGLE).is_file():
        return set()
    with safe_open(str(folder / SINGLE), framework="pt") as tensors:
        return set(tensors.keys())
