"""What `--help_all` adds: every flag of a command, grouped by where it comes from."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, get_type_hints

# Module and name of a dataclass, from the most derived on -> heading.
HEADINGS = (
    ("trl_stppo.cli", "", "task"),
    ("trl_stppo.trainer", "ST", "STPPO"),
    ("trl_stppo.trainer", "PPO", "PPO"),
    ("trl.trainer.model_config", "", "model (TRL)"),
    ("trl.scripts", "", "task"),
    ("trl", "GRPO", "GRPO (TRL)"),
    ("", "", "training (TRL and transformers)"),
)
ORDER = tuple(dict.fromkeys(heading for *_, heading in HEADINGS))
LAUNCHER = """\
launcher:
  --accelerate_config NAME_OR_PATH
      File for accelerate, or the name of one that is shipped: {names}.
  Every flag of `accelerate launch --help` that is not above, such as --num_processes.
"""


def described(types: Sequence[type], *, launcher: Sequence[str] = ()) -> str:
    """The flags of some dataclasses; with names of accelerate's files where the command is launched."""
    groups: dict[str, list[str]] = {heading: [] for heading in ORDER}
    for owner in types:
        for spec, heading in _with_headings(owner):
            groups[heading].append(_entry(owner, spec))
    parts = [f"{heading}:\n" + "".join(lines) for heading, lines in groups.items() if lines]
    if launcher:
        parts.append(LAUNCHER.format(names=", ".join(launcher)))
    return "\n".join(parts)


def _with_headings(owner: type) -> Iterator[tuple[Field[Any], str]]:
    for spec in fields(owner):
        if spec.init:
            source = next(c for c in owner.__mro__ if spec.name in inspect.get_annotations(c))
            yield spec, heading_of(source)


def heading_of(source: type) -> str:
    """The group of what a dataclass adds or changes."""
    return next(
        heading
        for module, name, heading in HEADINGS
        if source.__module__.startswith(module) and source.__name__.startswith(name)
    )


def _entry(owner: type, spec: Field[Any]) -> str:
    default = spec.default if spec.default_factory is MISSING else spec.default_factory()
    shown = "" if default in (None, MISSING) else f" (default {getattr(default, 'value', default)})"
    meaning = " ".join(f"{spec.metadata.get('help', '')}{shown}".split())
    lines = textwrap.wrap(meaning, 90, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join([f"  --{spec.name} {_kind(owner, spec)}", *lines]) + "\n"


def _kind(owner: type, spec: Field[Any]) -> str:
    """The type, shortly."""
    hint = get_type_hints(owner)[spec.name] if isinstance(spec.type, str) else spec.type
    text = getattr(hint, "__name__", None) if isinstance(hint, type) else None
    text = (text or str(hint)).replace("typing.", "").replace("NoneType", "None")
    parts = [part.strip() for part in text.split("|")]
    kept = [part for part in parts if part not in ("None", "dict", "list")] or parts
    return "|".join(kept).replace(" ", "").upper() if len(kept) < 3 else "VALUE"
