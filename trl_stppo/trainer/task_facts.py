"""What a run was about: its model, its environment, its data, by their names alone.

`metrics.jsonl` holds them beside the settings, so that runs of different tasks are told apart.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ..redaction import is_secret, redacted
from ._trl import get_config_model_id
from .run_facts import hub_datasets

if TYPE_CHECKING:
    from .ppo_trainer import PPOTrainer

# What `datasets` calls rows that it has read from files; says how, not which.
READERS = ("arrow", "csv", "generator", "json", "pandas", "parquet", "text")
_WORD = re.compile(r"[\w.-]{1,24}")


def task_facts(trainer: PPOTrainer) -> dict[str, str]:
    """Names of the model, the environment and the data.

    Args:
        trainer: that is about to train.

    Returns:
        For each a name, without the folders that lead there and without secrets.
    """
    return {
        "model": _model(trainer.accelerator.unwrap_model(trainer.model)),
        "environment": _environment(trainer),
        "dataset": _dataset(trainer),
    }


def _model(model: Any) -> str:
    named = get_config_model_id(model.config) or ""
    # Two parts, as on the Hub: of `runs/a/checkpoint-100` one would not tell.
    return "/".join(PurePath(named).parts[-2:]) or type(model).__name__


def _environment(trainer: PPOTrainer) -> str:
    """Classes with the arguments that were bound to them; else whoever plays the episodes."""
    plan = trainer._rollout_plan
    factories = {**plan.text, **plan.tools}
    names = [
        type(probe).__name__ + _arguments(factories.get(name))
        for name, probe in plan.probes.items()
    ]
    tools = [getattr(tool, "__name__", type(tool).__name__) for tool in plan.standalone_tools]
    names += [f"tools {' '.join(tools)}"] if tools else []
    if not names and plan.user_func is not None:
        names = [getattr(plan.user_func, "__name__", type(plan.user_func).__name__)]
    return " + ".join(names) or "none"


def _arguments(factory: Any) -> str:
    """`(largest=7)` of a `functools.partial`; what is long or has folders by a short digest alone."""
    if not isinstance(factory, functools.partial):
        return ""
    words = [_short(value) for value in factory.args]
    words += [f"{k}={_short(v)}" for k, v in factory.keywords.items() if not is_secret(k)]
    return f"({', '.join(words)})" if words else ""


def _short(value: Any) -> str:
    """The value where it is a number or a word, else what tells it from others without saying it."""
    value = redacted(value)
    if isinstance(value, (int, float)) or _WORD.fullmatch(str(value)):
        return str(value)
    text = json.dumps(value, skipkeys=True, default=lambda other: type(other).__name__)
    return f"#{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def _dataset(trainer: PPOTrainer) -> str:
    """The name as far as it is known, and the number of rows, which is the same for every seed."""
    rows: Any = trainer.train_dataset
    name = getattr(getattr(rows, "info", None), "dataset_name", None)
    names = hub_datasets(trainer) or ([] if name is None or name in READERS else [name])
    size = f"{len(rows)} rows" if hasattr(rows, "__len__") else "a stream"
    return f"{names[0]}, {size}" if names else size
