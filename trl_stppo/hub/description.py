"""What a run is: one description behind its card, `agent.json`, checkpoints, log and dry run.

`trainer/publishing/describe.py` builds it, of a trainer or of a run that is only planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any


@dataclass(frozen=True)
class Environment:
    """One environment of the run.

    Attributes:
        name: among several, None for the only one.
        kind: "text" or "tools".
        class_name: of its instances.
        module: where the class is.
        arguments: bound to the class, as "(largest=7)"; without secrets.
        about: first paragraph of its docstring.
        tools: name and first line of the docstring of each tool.
    """

    name: str | None
    kind: str
    class_name: str
    module: str
    arguments: str = ""
    about: str = ""
    tools: tuple[tuple[str, str], ...] = ()

    @property
    def importable(self) -> bool:
        """Whether `from module import class_name` is Python, and reaches it elsewhere too."""
        names = [*self.module.split("."), self.class_name]
        return all(name.isidentifier() for name in names) and self.module != "__main__"


@dataclass(frozen=True)
class Description:
    """A run: who trains what, where, on which rows, with which settings.

    Attributes:
        trainer: class that trains.
        method: such as "ST-PPO".
        paper: its number on arXiv.
        variant: of the method, if it has any.
        model: the policy's name on the Hub or path; its class where it has neither.
        dtype: of its weights, such as "bfloat16".
        adapter: `type`, rank `r` and `target_modules` of what is trained of it; None for all of it.
        quantization: of bitsandbytes, None for none.
        critic: "none", "shared" (an adapter on the policy's backbone) or "separate", the latter with
            type and rank of its own adapter.
        environments: that the run plays.
        tools: name and first line of the docstring of those that belong to no environment.
        player: name of the function that plays the episodes in place of the engine.
        dataset: name of the rows, if they have one.
        rows: how many, None for a stream.
        settings: those that move weights, without secrets.
    """

    trainer: str
    method: str
    paper: str | None
    variant: str | None
    model: str
    dtype: str
    adapter: Mapping[str, Any] | None
    quantization: dict[str, Any] | None
    critic: str
    environments: tuple[Environment, ...]
    tools: tuple[tuple[str, str], ...]
    player: str | None
    dataset: str | None
    rows: int | None
    settings: Mapping[str, Any]

    @property
    def environment(self) -> str:
        """All that is played, by name; else whoever plays the episodes."""
        names = [each.class_name.rpartition(".")[2] + each.arguments for each in self.environments]
        names += [f"tools {' '.join(name for name, _ in self.tools)}"] if self.tools else []
        return " + ".join(names) or self.player or "none"

    @property
    def training(self) -> str:
        """How the policy is trained, in words."""
        if self.adapter is None:
            return f"fully trained, {self.dtype}"
        stored = self.quantization or {}
        bits = next((f" on {n}-bit weights" for n in (4, 8) if stored.get(f"load_in_{n}bit")), "")
        return f"{self.adapter_kind} of rank {self.adapter['r']}{bits}, {self.dtype}"

    @property
    def adapter_kind(self) -> str | None:
        """As people write it."""
        if self.adapter is None:
            return None
        kind = str(self.adapter["type"])
        return "LoRA" if kind == "LORA" else kind

    @property
    def task(self) -> dict[str, str]:
        """Names of model, environment and data, by which runs of different tasks are told apart.

        Without the folders that lead there, and without secrets.
        """
        size = "a stream" if self.rows is None else f"{self.rows} rows"
        return {
            # Two parts, as on the Hub: of `runs/a/checkpoint-100` one would not tell.
            "model": "/".join(PurePath(self.model).parts[-2:]),
            "environment": self.environment,
            "dataset": size if self.dataset is None else f"{self.dataset}, {size}",
        }
