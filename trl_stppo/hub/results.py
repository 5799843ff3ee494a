"""The last evaluation in a run's log, as a table and as the Hub's `model-index`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from huggingface_hub import EvalResult

from ..watch.figures import SCORE, SUCCESS, number
from .markdown import escaped, table

PREFIX = "eval_"
# Metric of an evaluation -> its name in the table (docs/evaluation.md).
FIGURES = {
    SUCCESS: "success rate",
    SCORE: "score",
    "turns/mean": "turns per episode",
    "turns/valid_action_rate": "valid actions",
    "turns/tokens_mean": "tokens per turn",
    "episodes": "episodes",
}
# Metric -> its type in the model-index.
INDEXED = {SUCCESS: "success_rate", SCORE: "mean_reward"}


class Evaluation(NamedTuple):
    """The finite metrics of one evaluation data set, named as in docs/evaluation.md."""

    name: str | None  # of the dataset among several
    step: int  # optimizer steps
    figures: Mapping[str, float]


def last_evaluations(history: Sequence[Mapping[str, Any]]) -> list[Evaluation]:
    """Return the evaluations at the last evaluated optimizer step of a log, one per data set."""
    found: dict[str, Evaluation] = {}
    for entry in history:
        step = int(entry.get("step", 0))
        for key in entry:
            if not key.startswith(PREFIX) or not key.endswith(SCORE):
                continue
            prefix = key.removesuffix(SCORE)
            known = {k: number(value) for k, value in entry.items() if k.startswith(prefix)}
            figures = {k.removeprefix(prefix): v for k, v in known.items() if v is not None}
            name = prefix.removeprefix(PREFIX).removesuffix("_") or None
            found = {p: other for p, other in found.items() if other.step == step}
            found[prefix] = Evaluation(name, step, figures)
    return list(found.values())


def results_table(evaluations: Sequence[Evaluation]) -> str:
    """Return a Markdown table with a line per metric (and 95 % interval) and a column per data set."""
    heads = [escaped(e.name, 60) if e.name else "held-out rows" for e in evaluations]
    rows = ([label, *(_shown(e.figures, n) for e in evaluations)] for n, label in FIGURES.items())
    return table(["", *heads], [row for row in rows if any(row[1:])])


def _shown(figures: Mapping[str, float], name: str) -> str:
    if name not in figures:
        return ""
    value, low, high = figures[name], figures.get(f"{name}_low"), figures.get(f"{name}_high")
    if name == "episodes":
        return f"{value:.0f}"
    return f"{value:.3f}" + ("" if low is None or high is None else f" ({low:.3f} to {high:.3f})")


def model_index(evaluations: Sequence[Evaluation], data: str) -> list[EvalResult]:
    """Return success rate and score in the Hub's format. `data` names a data set without a name."""
    return [
        EvalResult(
            task_type="reinforcement-learning",
            task_name="Multi-turn agent",
            dataset_type="rollout",
            dataset_name=evaluation.name or data,
            dataset_config=evaluation.name,  # keeps several datasets apart
            metric_type=kind,
            metric_name=FIGURES[figure],
            metric_value=round(evaluation.figures[figure], 6),
        )
        for evaluation in evaluations
        for figure, kind in INDEXED.items()
        if figure in evaluation.figures
    ]
