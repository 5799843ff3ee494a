"""The files that a push uploads, and what a run adds to TRL's model card."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..paths import CRITIC_FOLDER
from ..watch.runs import MEASURES, SCORE, number
from .settings import AGENT_FILE

CARD = "README.md"
# The files of a model and its tokenizer. A push uploads no other files.
MODEL_FILES = (
    *("*.safetensors", "*.safetensors.index.json", "adapter_config.json"),
    *("config.json", "generation_config.json", "processor_config.json", "preprocessor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"),
    *("sentencepiece.bpe.model", "*.jinja"),
)
SETTINGS = (
    *("variant", "stabilizers", "learning_rate", "cliprange", "generation_batch_size"),
    *("num_ppo_epochs", "num_mini_batches", "kl_coef", "temperature", "seed"),
)
OF_CRITIC = ("critic_learning_rate", "gamma", "lam", "cliprange_value")
NO_BASE = re.compile(r"This model is a fine-tuned version of \[None\].*\n")
QUICK_START = re.compile(r"(?<=## Quick start\n\n).*?(?=\n## )", re.DOTALL)
START = """\
```python
from trl_stppo import Agent

agent = Agent.from_pretrained({repo!r})  # plays as the run's evaluation did
```
"""


def agent_files(folder: Path, *, code: bool = False) -> list[str]:
    """Return the paths of an agent's files in its folder; `code` includes the model's Python files."""
    own = (*MODEL_FILES, CARD, AGENT_FILE, *(["*.py"] if code else []))
    parts = {
        "*": own,
        "additional_chat_templates/*": ("*.jinja",),
        f"{CRITIC_FOLDER}/**/*": MODEL_FILES,
    }
    return [
        path.relative_to(folder).as_posix()
        for part, names in parts.items()
        for path in sorted(folder.glob(part))
        if path.is_file() and any(map(path.match, names))
    ]


def complete_card(
    card: Path,
    repo: str,
    settings: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]],
) -> None:
    """Add to TRL's model card what TRL cannot know: how to load the agent, results, settings."""
    rows = [[f"`{name}`", f"`{value}`"] for name, value in settings.items() if value is not None]
    sections = {"Results": results(history), "Settings": _table(["option", "value"], rows)}
    # TRL's lines chat in one turn, and name a base model without a Hub id "None".
    text = NO_BASE.sub("This model is an agent of several turns.\n", card.read_text(encoding="utf-8"))
    text = QUICK_START.sub(lambda _: START.format(repo=repo), text)
    text += "".join(f"\n\n## {name}\n\n{table}" for name, table in sections.items() if table)
    card.write_text(f"{text}\n", encoding="utf-8")


def results(history: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the log's last evaluation, with 95 % intervals, or "" without an evaluation."""
    last = {
        key.removesuffix(SCORE): entry
        for entry in history
        for key in entry
        if key.startswith("eval_") and key.endswith(SCORE)
    }
    step = max((entry["step"] for entry in last.values()), default=0)
    rows = [
        [
            prefix.removeprefix("eval_").removesuffix("_") or "held-out rows",
            str(step),
            *(_shown(entry, prefix + name) for name in MEASURES.values()),
        ]
        for prefix, entry in last.items()
        if entry["step"] == step
    ]
    return _table(["data", "step", *MEASURES], rows)


def _shown(figures: Mapping[str, Any], name: str) -> str:
    value, low, high = (number(figures.get(name + end)) for end in ("", "_low", "_high"))
    bounds = "" if low is None or high is None else f" ({low:.3f} to {high:.3f})"
    return "" if value is None else f"{round(value, 3):g}{bounds}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) if rows else ""
