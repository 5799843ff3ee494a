"""Builds a run's `hub.description.Description` from a trainer or from a plan."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..envs.base import tool_names
from ..hub.description import Description, Environment
from ..models.critic import SeparateCritic
from ..redaction import is_secret, redacted
from ._trl import get_config_model_id
from .bridge import Bridge, Internals
from .planning.plan import RolloutPlan
from .ppo_config import PPOConfig

# Names that `datasets` gives to rows read from files: the reader, not the data.
READERS = ("arrow", "csv", "generator", "json", "pandas", "parquet", "text")
# An argument that the commands bind, not the user.
COUNTER = "count_tokens"
_WORD = re.compile(r"[\w.-]{1,24}")
# A folder in which `datasets` keeps rows of the Hub.
_CACHED = re.compile(r"([\w.-]*[^\W_])___([^\W_][\w.-]*)")


def describe(host: Bridge, rollout: RolloutPlan) -> Description:
    """Describe a trainer's run with its rollout plan."""
    model = host.accelerator.unwrap_model(host.model)
    critic = "none" if not host.has_critic else "shared"
    if isinstance(host.critic, SeparateCritic):
        lora = adapter_of(host.critic.model)
        critic = "separate" if lora is None else f"separate, {lora['type']} of rank {lora['r']}"
    quantization: Any = getattr(model.config, "quantization_config", None)
    return description_of(
        type(host),
        host.args,
        rollout,
        host.train_dataset,
        model=get_config_model_id(model.config) or type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        adapter=adapter_of(model),
        quantization=as_json(quantization.to_dict()) if hasattr(quantization, "to_dict") else None,
        critic=critic,
    )


def description_of(
    trainer_class: Any, args: PPOConfig, rollout: RolloutPlan | None, rows: Any, **models: Any
) -> Description:
    """Describe a run from its settings. `rollout` and `rows` are None if unknown."""
    rollout, card = rollout or RolloutPlan(), Internals(trainer_class)
    player = rollout.user_func
    known = getattr(getattr(rows, "info", None), "dataset_name", None)
    return Description(
        trainer=trainer_class.__name__,
        method=card.method,
        paper=card.paper.get("id"),
        variant=getattr(args, "variant", None),
        environments=tuple(_environments(rollout)),
        tools=_tool_list(rollout.standalone_tools),
        player=None if player is None else _name_of(player),
        dataset=next(iter(hub_datasets(rows)), None if known in READERS else known),
        rows=len(rows) if hasattr(rows, "__len__") else None,
        settings=algorithm_settings(args),
        **models,
    )


def adapter_of(model: Any) -> Mapping[str, Any] | None:
    """Describe a model's PEFT adapter; return None if the model is trained in full."""
    config = getattr(model, "peft_config", {}).get("default")
    if config is None:
        return None
    targets = getattr(config, "target_modules", None)
    kind = getattr(config.peft_type, "value", config.peft_type)
    named = sorted(targets) if isinstance(targets, (set, list, tuple)) else targets
    return {"type": str(kind), "r": getattr(config, "r", None), "target_modules": named}


def algorithm_settings(args: Any) -> dict[str, Any]:
    """Return this package's settings, and the settings of TRL and transformers that affect the weights."""
    names = {"learning_rate", "weight_decay", "epsilon", "epsilon_high", "beta", "loss_type"}
    names |= {"optim", "adam_beta1", "adam_beta2", "adam_epsilon"}
    names |= {"lr_scheduler_type", "max_grad_norm", "temperature"}
    names |= {"importance_sampling_level", "generation_batch_size", "bf16", "seed"}
    for base in type(args).__mro__:
        if base.__module__.split(".")[0] == __name__.split(".")[0]:
            names |= vars(base).get("__annotations__", {}).keys()  # without inherited ones
    names &= {spec.name for spec in fields(args)}
    names -= {"report_to", "logging_steps"}  # they move no weights
    values = {name: getattr(args, name, None) for name in sorted(names)}
    values = {name: getattr(value, "value", value) for name, value in values.items()}
    simple = (bool, int, float, str, list, dict, type(None))
    return redacted({name: value for name, value in values.items() if isinstance(value, simple)})


def hub_datasets(rows: Any) -> list[str]:
    """Return the Hub ids of data sets, read from the cache paths `<namespace>___<name>`."""
    files = getattr(rows, "cache_files", None) or []
    parts = [_CACHED.fullmatch(part) for file in files for part in Path(file["filename"]).parts]
    return list(dict.fromkeys(f"{part[1]}/{part[2]}" for part in parts if part))


def as_json(value: Any) -> Any:
    """Convert a value to plain JSON data."""
    return json.loads(json.dumps(value, default=str))


def _environments(rollout: RolloutPlan) -> Iterable[Environment]:
    for name, probe in rollout.probes.items():
        cls, is_text = type(probe), name in rollout.text
        factory = (rollout.text if is_text else rollout.tools).get(name)
        tools = [] if is_text else [getattr(probe, tool) for tool in tool_names(probe)]
        about = inspect.cleandoc(cls.__dict__.get("__doc__") or "").split("\n\n")[0]
        yield Environment(
            name=name,
            kind="text" if is_text else "tools",
            class_name=cls.__qualname__,
            module=cls.__module__,
            arguments=_arguments(factory),
            about=about,
            tools=_tool_list(tools),
        )


def _arguments(factory: Any) -> str:
    """Return a partial's arguments as text, such as `(largest=7)`; long values become digests."""
    if not isinstance(factory, functools.partial):
        return ""
    try:
        named = inspect.signature(factory.func).bind_partial(*factory.args).arguments
    except (TypeError, ValueError):  # it might hold a secret, so it is left out
        named = {}
    words = [_short(value) for name, value in named.items() if not is_secret(name)]
    for name, value in factory.keywords.items():
        if not is_secret(name) and not (name == COUNTER and callable(value)):
            words.append(f"{name}={_short(value)}")
    return f"({', '.join(words)})" if words else ""


def _short(value: Any) -> str:
    """Return a number or a word as text, and any other value as a digest."""
    value = redacted(value)
    if isinstance(value, (int, float)) or _WORD.fullmatch(str(value)):
        return str(value)
    text = json.dumps(value, skipkeys=True, default=lambda other: type(other).__name__)
    return f"#{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def _tool_list(tools: Iterable[Any]) -> tuple[tuple[str, str], ...]:
    return tuple((_name_of(tool), (inspect.getdoc(tool) or "").split("\n")[0]) for tool in tools)


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
