"""Weights from a folder into a model that is there already, under whatever names the disk has them."""

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
    """Load weights that the disk has in another form than the model, and only those.

    transformers saves the experts of a mixture one by one, as checkpoints on the Hub have them, and keeps
    them in one tensor. Its trainer loads by name alone, and passes over what it does not find.

    Returns:
        Whether there were such weights, so that all are loaded now.
    """
    names = _names(folder)
    if not names or not hasattr(model, "config") or names <= set(model.state_dict()):
        return False
    # Wide enough for all: what is copied into narrower weights comes from them.
    dtype = reduce(torch.promote_types, (p.dtype for p in model.parameters()))
    config = copy.deepcopy(model.config)  # which is given the folder's name
    saved = type(model).from_pretrained(folder, config=config, dtype=dtype)
    model.load_state_dict(saved.state_dict())
    return True


def _names(folder: Path) -> set[str]:
    """Of the tensors in a folder; none where they are not in safetensors."""
    from safetensors import safe_open

    if (folder / INDEX).is_file():
        return set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    if not (folder / SINGLE).is_file():
        return set()
    with safe_open(str(folder / SINGLE), framework="pt") as tensors:  # its header alone is read
        return set(tensors.keys())
