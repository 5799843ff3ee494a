"""What a configuration says of names and values that cannot be, in terms of what was typed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ..wording import proposal

if TYPE_CHECKING:
    from .ppo_config import PPOConfig


class KnownNames:
    """Refuses unknown arguments of a dataclass by what they may have been meant to be."""

    def __new__(cls, *args: Any, **given: Any) -> KnownNames:
        """Look at the names; the rest is `__init__`'s."""
        known = [spec.name for spec in fields(cls) if spec.init]  # type: ignore[arg-type]
        for name in given:
            if name not in known:
                advice = (
                    proposal(name, known) or "docs/configuration.md lists those that there are."
                )
                raise TypeError(f"{cls.__name__} has no argument `{name}`. {advice}")
        return super().__new__(cls)


@contextmanager
def explained(config: PPOConfig) -> Iterator[None]:
    """Say what upstream refuses in terms of what was set, and with what to type instead."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        if "support bf16" in text:
            raise ValueError(
                "`bf16=True` (the default) needs a GPU with bfloat16, and there is none here. On a CPU: "
                "`--use_cpu true --bf16 false` (YAML: `use_cpu: true` and `bf16: false`; Python: "
                "use_cpu=True, bf16=False)."
            ) from error
        if "must be divisible by num_generations" in text:
            raise ValueError(_wrong_groups(config)) from error
        raise


def _wrong_groups(config: PPOConfig) -> str:
    rows, steps = config.per_device_train_batch_size, config.steps_per_generation
    episodes, group = int(config.generation_batch_size or 0), config.num_generations or 1
    allowed = [n for n in range(1, episodes + 1) if episodes % n == 0]
    nearest = min(allowed, key=lambda n: abs(n - group))
    return (
        f"`num_generations={group}` does not divide the {episodes} episodes of a rollout batch "
        f"(`per_device_train_batch_size={rows}` x {steps} micro-batches of gradient accumulation x "
        f"{config.world_size} process(es)). Allowed are {', '.join(map(str, allowed))}. Set "
        f"num_generations={nearest}, or change per_device_train_batch_size or "
        f"gradient_accumulation_steps so that {group} divides the product."
    )
