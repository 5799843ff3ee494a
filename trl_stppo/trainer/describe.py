"""Names and settings of a run, for its log, checkpoints, `agent.json` and card."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from dataclasses import fields
from pathlib import PurePath
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..models.critic import Critic, SeparateCritic, SharedCritic
from ..rollout.environments import Factories
from ..rollout.reward_funcs import name_of
from ._trl import get_config_model_id
from .planning.plan import RolloutPlan
from .ppo_config import PPOConfig

# Names that `datasets` gives to rows read from files. They name the reader, not the data.
READERS = ("arrow", "csv", "generator", "json", "pandas", "parquet", "text")
_WORD = re.compile(r"[\w.-]{1,24}")


def task(policy: PreTrainedModel, rows: object, rollout: RolloutPlan) -> dict[str, str]:
    """Return the short names of a run's model, environment and data set.

    The environment's name lists the rollout plan's environments with their arguments, its tools, and the
    function that plays the episodes.
    """
    model = get_config_model_id(policy.config) or type(policy).__name__
    factories: Factories = {**rollout.tools, **rollout.text}
    probes = rollout.probes.items()
    players = [type(probe).__name__ + _arguments(factories.get(name)) for name, probe in probes]
    if rollout.standalone_tools:
        players.append(f"tools {' '.join(map(name_of, rollout.standalone_tools))}")
    players += [name_of(each) for each in (rollout.user_func, rollout.agent) if each is not None]
    size = f"{len(rows)} rows" if hasattr(rows, "__len__") else "a stream"
    known = getattr(getattr(rows, "info", None), "dataset_name", None)
    return {
        # Keep two parts, because the last part of `runs/a/checkpoint-100` is ambiguous.
        "model": "/".join(PurePath(model).parts[-2:]),
        "environment": " + ".join(players) or "none",
        "dataset": ", ".join(filter(None, (None if known in READERS else known, size))),
    }


def critic_of(critic: Critic) -> str:
    """Describe a critic: "none", "shared" or "separate", with its adapter's type and rank."""
    if not isinstance(critic, SeparateCritic):
        return "shared" if isinstance(critic, SharedCritic) else "none"
    lora = adapter_of(critic.model)
    return "separate" if lora is None else f"separate, {lora['type']} of rank {lora['r']}"


def adapter_of(model: nn.Module) -> dict[str, object] | None:
    """Describe a model's PEFT adapter; return None if the model is trained in full."""
    config = getattr(model, "peft_config", {}).get("default")
    if config is None:
        return None
    targets = getattr(config, "target_modules", None)
    kind = getattr(config.peft_type, "value", config.peft_type)
    named = sorted(targets) if isinstance(targets, (set, list, tuple)) else targets
    return {"type": str(kind), "r": getattr(config, "r", None), "target_modules": named}


def processor_of(processing_class: Any) -> dict[str, str] | None:
    """Describe an image processor by class, backend and digest of settings; return None for a tokenizer."""
    eyes = getattr(processing_class, "image_processor", None)
    if eyes is None:
        return None
    backend = str(getattr(eyes, "backend", None))
    kind, settings = type(processing_class).__name__, _digest(eyes.to_dict())
    return {"class": kind, "backend": backend, "settings": settings}


def algorithm_settings(args: PPOConfig) -> dict[str, object]:
    """Return this package's settings, and the settings of TRL and transformers that affect the weights."""
    names = {"learning_rate", "weight_decay", "epsilon", "epsilon_high", "beta", "loss_type"}
    names |= {"optim", "adam_beta1", "adam_beta2", "adam_epsilon"}
    names |= {"lr_scheduler_type", "max_grad_norm", "temperature"}
    names |= {"importance_sampling_level", "generation_batch_size", "bf16", "seed"}
    for base in type(args).__mro__:
        if base.__module__.split(".")[0] == __name__.split(".")[0]:
            # `vars` excludes inherited annotations, which may belong to other packages.
            names |= vars(base).get("__annotations__", {}).keys()
    names &= {spec.name for spec in fields(args)}
    # These settings do not affect the weights; addresses may hold a password, and checkpoints are uploaded.
    names -= {"report_to", "logging_steps", "sft_model_path", "reward_model_path"}
    values = {name: getattr(args, name, None) for name in sorted(names)}
    values = {name: getattr(value, "value", value) for name, value in values.items()}
    simple = (bool, int, float, str, list, type(None))
    return {name: value for name, value in values.items() if isinstance(value, simple)}


def _arguments(factory: object) -> str:
    """Return a partial's arguments as text, such as `(largest=7)`; long values become digests."""
    if not isinstance(factory, functools.partial):
        return ""
    named = {name: value for name, value in factory.keywords.items() if not callable(value)}
    shown = [*map(_short, factory.args), *(f"{name}={_short(value)}" for name, value in named.items())]
    return f"({', '.join(shown)})" if shown else ""


def _short(value: object) -> str:
    """Return a number or a word as text, and any other value as a digest."""
    if isinstance(value, (int, float)) or _WORD.fullmatch(str(value)):
        return str(value)
    return f"#{_digest(value)[:6]}"


def _digest(value: object) -> str:
    text = json.dumps(value, skipkeys=True, default=lambda other: type(other).__name__)
    return hashlib.sha256(text.encode()).hexdigest()
