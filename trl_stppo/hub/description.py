"""The description of a run, used by its card, `agent.json`, checkpoints, log and dry run.

`trainer/describe.py` builds it from a trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any


@dataclass(frozen=True)
class Environment:
    """Description of one environment of a run."""

    name: str | None  # None if it is the only one
    kind: str  # "text" or "tools"
    class_name: str
    module: str
    arguments: str = ""  # bound to the class, as "(largest=7)"; without secrets
    about: str = ""  # first paragraph of its docstring
    tools: tuple[tuple[str, str], ...] = ()  # name and first line of the docstring

    @property
    def importable(self) -> bool:
        """Return whether `from module import class_name` works in other programs."""
        names = [*self.module.split("."), self.class_name]
        return all(name.isidentifier() for name in names) and self.module != "__main__"


@dataclass(frozen=True)
class Description:
    """Description of a run: trainer, model, critic, environments, rows, settings."""

    trainer: str  # class
    method: str  # such as "ST-PPO"
    paper: str | None  # number on arXiv
    variant: str | None
    model: str  # the policy's name on the Hub or path, else its class
    dtype: str  # of its weights, such as "bfloat16"
    adapter: Mapping[str, Any] | None  # `type`, rank `r`, `target_modules`; None: fully trained
    quantization: dict[str, Any] | None  # of bitsandbytes
    critic: str  # "none", "shared" (an adapter on the policy), "separate" (and its adapter's type, rank)
    environments: tuple[Environment, ...]
    tools: tuple[tuple[str, str], ...]  # without an environment; as in `Environment`
    player: str | None  # function that plays the episodes in place of the engine
    dataset: str | None
    rows: int | None  # None for a stream
    settings: Mapping[str, Any]  # without secrets

    @property
    def environment(self) -> str:
        """Return the environments' and tools' names, or else the name of the function that plays episodes."""
        names = [each.class_name.rpartition(".")[2] + each.arguments for each in self.environments]
        names += [f"tools {' '.join(name for name, _ in self.tools)}"] if self.tools else []
        return " + ".join(names) or self.player or "none"

    @property
    def training(self) -> str:
        """Describe the policy's training in words, such as `LoRA of rank 16, bfloat16`."""
        if self.adapter is None:
            return f"fully trained, {self.dtype}"
        stored = self.quantization or {}
        bits = next((f" on {n}-bit weights" for n in (4, 8) if stored.get(f"load_in_{n}bit")), "")
        return f"{self.adapter_kind} of rank {self.adapter['r']}{bits}, {self.dtype}"

    @property
    def adapter_kind(self) -> str | None:
        """Return the adapter's type in its usual spelling, such as "LoRA"; None without an adapter."""
        if self.adapter is None:
            return None
        kind = str(self.adapter["type"])
        return "LoRA" if kind == "LORA" else kind

    @property
    def task(self) -> dict[str, str]:
        """Return the short names of model, environment and data set, without secrets."""
        size = "a stream" if self.rows is None else f"{self.rows} rows"
        return {
            # Two parts, as on the Hub: the last of `runs/a/checkpoint-100` is ambiguous.
            "model": "/".join(PurePath(self.model).parts[-2:]),
            "environment": self.environment,
            "dataset": size if self.dataset is None else f"{self.dataset}, {size}",
        }
