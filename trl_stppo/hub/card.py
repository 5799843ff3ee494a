"""Results and settings of a run, for TRL's model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load

from ..watch.figures import SCORE, SUCCESS, number

CARD = "README.md"
# transformers' tag on its cards.
GENERATED = "generated_from_trainer"
# Metric of an evaluation -> its name in the table (docs/evaluation.md).
FIGURES = {
    SUCCESS: "success rate",
    SCORE: "score",
    "turns/mean": "turns per episode",
    "turns/valid_action_rate": "valid actions",
    "episodes": "episodes",
}
SETTINGS = (
    *("variant", "stabilizers", "learning_rate", "cliprange", "generation_batch_size"),
    *("num_ppo_epochs", "num_mini_batches", "kl_coef", "temperature", "seed"),
)
OF_CRITIC = ("critic_learning_rate", "gamma", "lam", "cliprange_value")


def may_be_written(path: Path) -> bool:
    """Return whether a model card may be overwritten: it is missing, or a trainer has written it."""
    try:
        return not path.exists() or GENERATED in (metadata_load(path) or {})["tags"]
    except Exception:
        # A card without readable tags is a user's.
        return False


def add_run(
    path: Path, repo: str, settings: Mapping[str, Any], history: Sequence[Mapping[str, Any]]
) -> None:
    """Add results and settings to the card that TRL has written.

    `settings` are those of the run, without secrets, and `history` is its log.
    """
    rows = [[f"`{name}`", f"`{value}`"] for name, value in settings.items() if value is not None]
    sections = {
        "Agent": f"`trl_stppo.Agent.from_pretrained({repo!r})` plays as the run's evaluation did.",
        "Results": results(history),
        "Settings": _table(["option", "value"], rows),
    }
    text = "".join(f"## {name}\n\n{text}\n\n" for name, text in sections.items() if text)
    before, heading, after = path.read_text(encoding="utf-8").partition("## Training procedure")
    path.write_text(f"{before.rstrip()}\n\n{text}{heading}{after}", encoding="utf-8")


def results(history: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the log's last evaluation, with 95 % intervals; an empty text without one."""
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
            *(_shown(entry, prefix + name) for name in FIGURES),
        ]
        for prefix, entry in last.items()
        if entry["step"] == step
    ]
    return _table(["data", *FIGURES.values()], rows)


def _shown(figures: Mapping[str, Any], name: str) -> str:
    value, low, high = (number(figures.get(name + end)) for end in ("", "_low", "_high"))
    bounds = "" if low is None or high is None else f" ({low:.3f} to {high:.3f})"
    return "" if value is None else f"{round(value, 3):g}{bounds}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) if rows else ""
