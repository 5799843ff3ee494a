"""What a model card says of a run, as plain data; `trainer/publishing.py` fills it in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EnvironmentFacts:
    """One environment of the run.

    Attributes:
        name: among several, None for the only one.
        kind: "text" or "tools".
        class_name: of its instances.
        module: where the class is.
        description: first paragraph of its docstring.
        tools: name and first line of the docstring of each tool.
    """

    name: str | None
    kind: str
    class_name: str
    module: str
    description: str
    tools: tuple[tuple[str, str], ...] = ()

    @property
    def importable(self) -> bool:
        """Whether `from module import class_name` is Python, and reaches it elsewhere too."""
        names = [*self.module.split("."), self.class_name]
        return all(name.isidentifier() for name in names) and self.module != "__main__"


@dataclass(frozen=True)
class CardFacts:
    """Everything that the card adds to TRL's.

    Attributes:
        title: of the card.
        repo: id on the Hub, or a path, by which the policy can be loaded.
        method: such as "ST-PPO".
        paper: its number on arXiv.
        trainer: class that has trained.
        variant: of the method, if it has any.
        base_model: id of the base model on the Hub, None where it has none there.
        licence: of the base model, where known.
        datasets: ids on the Hub.
        tags: of the repository.
        adapter: kind of the policy's adapter ("LORA"), None for a full model.
        critic: "shared" (an adapter on the policy's backbone), "separate" or None.
        environments: that the run has played.
        tools: functions that belong to no environment.
        limits: label and value, in words.
        system_prompt: of the rows.
        example: form of a row whose columns can be written down, for the code.
        settings: option and value.
        history: the run's log.
        versions: package and version, beside those that TRL names.
    """

    title: str
    repo: str
    method: str
    paper: str | None
    trainer: str
    variant: str | None = None
    base_model: str | None = None
    licence: str | None = None
    datasets: Sequence[str] = ()
    tags: Sequence[str] = ()
    adapter: str | None = None
    critic: str | None = None
    environments: Sequence[EnvironmentFacts] = ()
    tools: Sequence[tuple[str, str]] = ()
    limits: Sequence[tuple[str, str]] = ()
    system_prompt: str | None = None
    example: Mapping[str, Any] = field(default_factory=dict)
    settings: Sequence[tuple[str, object]] = ()
    history: Sequence[Mapping[str, Any]] = ()
    versions: Sequence[tuple[str, str]] = ()
