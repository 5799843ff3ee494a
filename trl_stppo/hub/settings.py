"""Settings of a run's evaluation episodes, saved as `agent.json`: plain data, no code."""

from __future__ import annotations

import dataclasses
import json
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import type_validator

from ..version import __version__

AGENT_FILE = "agent.json"
FORMAT = 1
DEFAULT_LENGTH = 2048
SAMPLING = ("temperature", "repetition_penalty", "top_p", "min_p", "top_k")


@dataclass(frozen=True)
class AgentSettings:
    """The settings of a run's evaluation episodes, saved as `agent.json` beside the model.

    Attributes:
        max_completion_length: tokens of an episode after its prompt, observations included; None for the
            model's limit (only runs without environments).
        max_tool_rounds: largest number of turns whose tools are called.
        max_images: images that the policy reads at once.
        env_timeout_seconds: time limit of one call of the environment.
        sampling: temperature and other settings of turns that are not greedy.
        eos_token_ids: ids that end a turn; empty for the model's own ids.
        environments: "module:Class" of each. Nothing is imported from there.
        quantization: quantization of the model in the run, as a bitsandbytes configuration.
        seed: seed of the run, which gives an agent the random numbers of the run's evaluation.
    """

    max_completion_length: int | None = DEFAULT_LENGTH
    max_turns: int | None = None
    max_turn_tokens: int | None = None
    max_tool_rounds: int | None = None
    max_images: int | None = None
    env_timeout_seconds: float | int | None = 120.0
    sampling: dict[str, Any] = field(default_factory=dict)
    eos_token_ids: list[int] = field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    environments: list[str] = field(default_factory=list)
    trainer: str | None = None
    dtype: str | None = None
    quantization: dict[str, Any] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(type(self)).items():
            type_validator(name, getattr(self, name), hint)

    def save(self, folder: Path) -> Path:
        """Write `agent.json` into a folder."""
        about = {"format": FORMAT, "written_by": f"trl_stppo {__version__}"}
        text = json.dumps({**about, **dataclasses.asdict(self)}, indent=1, default=str)
        path = folder / AGENT_FILE
        path.write_text(text + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, folder: Path) -> AgentSettings | None:
        """Read the settings from `agent.json` and ignore unknown keys; return None if there is no file."""
        path = folder / AGENT_FILE
        if not path.is_file():
            return None
        known = {f.name for f in dataclasses.fields(cls)}
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["format"] > FORMAT:
                raise ValueError(f"format is {found['format']}, must be <= {FORMAT}")
            return cls(**{name: value for name, value in found.items() if name in known})
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            text = f"`{path}` is damaged or too new ({type(error).__name__}: {error})."
            raise ValueError(text) from None
