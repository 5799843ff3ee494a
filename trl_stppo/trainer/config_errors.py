"""What a configuration says of names and values that cannot be, in terms of what was typed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..wording import RENAMED, proposal

if TYPE_CHECKING:
    from .ppo_config import PPOConfig


class KnownNames:
    """Refuses unknown arguments of a dataclass by what they may have been meant to be."""

    def __new__(cls, *args: Any, **given: Any) -> KnownNames:
        """Look at the names; the rest is `__init__`'s, which a subclass may have written itself."""
        known = inspect.signature(cls.__init__).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
        for name in given:
            if name not in known and not takes_any:
                advice = (
                    proposal(name, known) or "docs/configuration.md lists those that there are."
                )
                if name in RENAMED and RENAMED[name] not in known:
                    advice = (
                        "The trainer, ModelConfig or LoraConfig takes it; on the command line it is "
                        f"`--{RENAMED[name]}`."
                    )
                raise TypeError(f"{cls.__name__} has no argument `{name}`. {advice}")
        return super().__new__(cls)


@contextmanager
def explained(config: PPOConfig) -> Iterator[None]:
    """Say what upstream refuses in terms of what was set, and with what to type instead."""
    if config.num_generations is not None and config.num_generations < 1:
        raise ValueError(f"`num_generations={config.num_generations}`: must be 1 or more.")
    try:
        yield
    except ValueError as error:
        text = str(error)
        if "support bf16" in text:
            raise ValueError(_no_bf16(config)) from error
        if "must be divisible by num_generations" in text:
            raise ValueError(_wrong_groups(config)) from error
        raise


def _no_bf16(config: PPOConfig) -> str:
    name = "bf16" if config.bf16 else "bf16_full_eval"
    said = f"`{name}=True`{' (the default)' if config.bf16 else ''} needs a GPU with bfloat16"
    if torch.cuda.is_available():
        return f"{said}, which this one lacks: `--{name} false` computes in float32."
    return (
        f"{said}, and there is none here. On a CPU: `--use_cpu true --{name} false` (YAML: `use_cpu: "
        f"true` and `{name}: false`; Python: use_cpu=True, {name}=False)."
    )


def _wrong_groups(config: PPOConfig) -> str:
    rows, steps = config.per_device_train_batch_size, config.steps_per_generation
    episodes, group = int(config.generation_batch_size or 0), config.num_generations or 1
    least = 1 if type(config).num_generations == 1 else 2  # groups compare their members
    allowed = [n for n in range(least, episodes + 1) if episodes % n == 0]
    nearest = min(allowed, key=lambda n: abs(n - group))
    return (
        f"`num_generations={group}` does not divide the {episodes} episodes of a rollout batch "
        f"(`per_device_train_batch_size={rows}` x {steps} micro-batches of gradient accumulation x "
        f"{config.world_size} process(es)). Allowed are {', '.join(map(str, allowed))}. Set "
        f"num_generations={nearest}, or change per_device_train_batch_size or "
        f"gradient_accumulation_steps so that {group} divides the product."
    )
