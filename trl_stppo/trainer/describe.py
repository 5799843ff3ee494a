"""The description of a run, for its card, `agent.json`, checkpoints and log."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path, PurePath
from typing import Any

from ..models.critic import SeparateCritic
from ..redaction import redacted
from ._trl import get_config_model_id
from .bridge import Bridge
from .planning.plan import RolloutPlan

# Names that `datasets` gives to rows read from files: the reader, not the data.
READERS = ("arrow", "csv", "generator", "json", "pandas", "parquet", "text")
# An argument that the commands bind, not the user.
COUNTER = "count_tokens"
_WORD = re.compile(r"[\w.-]{1,24}")
# A folder in which `datasets` keeps rows of the Hub.
_CACHED = re.compile(r"([\w.-]*[^\W_])___([^\W_][\w.-]*)")


@dataclass(frozen=True)
class Description:
    """Description of a run.

    Attributes:
        trainer, variant: class of the trainer, and the option.
        model: the policy's name on the Hub or path, else its class.
        dtype: of its weights, such as "bfloat16".
        adapter: `type`, rank `r` and `target_modules`; None if all weights are trained.
        quantization: a bitsandbytes configuration, or None.
        critic: "none", "shared" (an adapter on the policy), or "separate" with its adapter's type and rank.
        environments: as in `AgentSettings`.
        tools: names of the functions without an environment.
        players: environments with their arguments, tools, or the function that plays the episodes.
        dataset: name of the training data, if it is known.
        rows: their number; None for a stream.
        settings: that affect the weights; without secrets.
    """

    trainer: str
    variant: str | None
    model: str
    dtype: str
    adapter: Mapping[str, Any] | None
    quantization: dict[str, Any] | None
    critic: str
    environments: list[dict[str, Any]]
    tools: list[str]
    players: list[str]
    dataset: str | None
    rows: int | None
    settings: Mapping[str, Any]

    @property
    def task(self) -> dict[str, str]:
        """Return the short names of model, environment and data set, without secrets."""
        size = "a stream" if self.rows is None else f"{self.rows} rows"
        return {
            # The last part of `runs/a/checkpoint-100` alone is ambiguous.
            "model": "/".join(PurePath(self.model).parts[-2:]),
            "environment": " + ".join(self.players) or "none",
            "dataset": size if self.dataset is None else f"{self.dataset}, {size}",
        }


def describe(host: Bridge, rollout: RolloutPlan) -> Description:
    """Describe a trainer's run with its rollout plan."""
    model, rows = host.accelerator.unwrap_model(host.model), host.train_dataset
    critic = "none" if not host.has_critic else "shared"
    if isinstance(host.critic, SeparateCritic):
        lora = adapter_of(host.critic.model)
        critic = "separate" if lora is None else f"separate, {lora['type']} of rank {lora['r']}"
    quantization: Any = getattr(model.config, "quantization_config", None)
    known = getattr(getattr(rows, "info", None), "dataset_name", None)
    classes = {name: type(probe) for name, probe in rollout.probes.items()}
    factories: dict[str | None, Any] = {**rollout.tools, **rollout.text}
    tools = [_name_of(tool) for tool in rollout.standalone_tools]
    return Description(
        trainer=type(host).__name__,
        variant=getattr(host.args, "variant", None),
        model=get_config_model_id(model.config) or type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        adapter=adapter_of(model),
        quantization=as_json(quantization.to_dict()) if hasattr(quantization, "to_dict") else None,
        critic=critic,
        environments=[
            {
                "name": name,
                "kind": "text" if name in rollout.text else "tools",
                "class": cls.__qualname__,
                "import": f"{cls.__module__}:{cls.__qualname__}",
            }
            for name, cls in classes.items()
        ],
        tools=tools,
        players=[
            *(cls.__name__ + _arguments(factories.get(name)) for name, cls in classes.items()),
            *([f"tools {' '.join(tools)}"] if tools else []),
            *([] if rollout.user_func is None else [_name_of(rollout.user_func)]),
        ],
        dataset=_hub_dataset(rows) or (None if known in READERS else known),
        rows=len(rows) if hasattr(rows, "__len__") else None,
        settings=algorithm_settings(host.args),
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
            # Without inherited annotations.
            names |= vars(base).get("__annotations__", {}).keys()
    names &= {spec.name for spec in fields(args)}
    # These move no weights.
    names -= {"report_to", "logging_steps"}
    values = {name: getattr(args, name, None) for name in sorted(names)}
    values = {name: getattr(value, "value", value) for name, value in values.items()}
    simple = (bool, int, float, str, list, dict, type(None))
    return redacted({name: value for name, value in values.items() if isinstance(value, simple)})


def as_json(value: Any) -> Any:
    """Convert a value to plain JSON data."""
    return json.loads(json.dumps(value, default=str))


def _hub_dataset(rows: Any) -> str | None:
    """Return the Hub id of a data set, read from the cache path `<namespace>___<name>`."""
    files = getattr(rows, "cache_files", None) or []
    parts = (_CACHED.fullmatch(part) for file in files for part in Path(file["filename"]).parts)
    return next((f"{part[1]}/{part[2]}" for part in parts if part), None)


def _arguments(factory: Any) -> str:
    """Return a partial's arguments as text, such as `(largest=7)`; long values become digests."""
    if not isinstance(factory, functools.partial):
        return ""
    try:
        given = dict(inspect.signature(factory.func).bind_partial(*factory.args).arguments)
    except (TypeError, ValueError):
        # Without its name, an argument might be a secret.
        given = {}
    words = [_short(value) for value in redacted(given, blank=None).values() if value is not None]
    for name, value in redacted(factory.keywords, blank=None).items():
        if value is not None and not (name == COUNTER and callable(value)):
            words.append(f"{name}={_short(value)}")
    return f"({', '.join(words)})" if words else ""


def _short(value: Any) -> str:
    """Return a number or a word as text, and any other value as a digest."""
    if isinstance(value, (int, float)) or _WORD.fullmatch(str(value)):
        return str(value)
    text = json.dumps(value, skipkeys=True, default=lambda other: type(other).__name__)
    return f"#{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
