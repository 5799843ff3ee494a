"""The last evaluation of a run, out of its log, as a table and as the Hub's `model-index`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from huggingface_hub import EvalResult

from ..watch.figures import SCORE, SUCCESS, number
from .markdown import escaped, table

PREFIX = "eval_"
# Figure of evaluation -> its name in the table; docs/evaluation.md explains them.
FIGURES = {
    SUCCESS: "success rate",
    SCORE: "score",
    "turns/mean": "turns per episode",
    "turns/valid_action_rate": "valid actions",
    "turns/tokens_mean": "tokens per turn",
    "episodes": "episodes",
}
# What goes into the model-index, as its kind of metric.
INDEXED = {SUCCESS: "success_rate", SCORE: "mean_reward"}


class Evaluation(NamedTuple):
    """The metrics of one evaluation dataset: finite, and by the names of docs/evaluation.md."""

    name: str | None  # of the dataset among several
    step: int  # optimizer steps that were done
    figures: Mapping[str, float]


def last_evaluations(history: Sequence[Mapping[str, Any]]) -> list[Evaluation]:
    """The evaluations at the last step at which there was one."""
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
    """Metrics in rows with their 95 % intervals, evaluation datasets in columns."""
    heads = [escaped(e.name, 60) if e.name else "held-out rows" for e in evaluations]
    rows = [
        [label, *(_shown(e.figures, name) for e in evaluations)] for name, label in FIGURES.items()
    ]
    return table(["", *heads], [row for row in rows if any(row[1:])])


def _shown(figures: Mapping[str, float], name: str) -> str:
    if name not in figures:
        return ""
    value, low, high = figures[name], figures.get(f"{name}_low"), figures.get(f"{name}_high")
    if name == "episodes":
        return f"{value:.0f}"
    return f"{value:.3f}" + ("" if low is None or high is None else f" ({low:.3f} to {high:.3f})")


def model_index(evaluations: Sequence[Evaluation], data: str) -> list[EvalResult]:
    """The figures that compare across models, in the Hub's form.

    Args:
        evaluations: of the run.
        data: what was played where a dataset has no name.
    """
    return [
        EvalResult(
            task_type="reinforcement-learning",
            task_name="Multi-turn agent",
            dataset_type="rollout",
            dataset_name=evaluation.name or data,
            dataset_config=evaluation.name,  # or those of several would be taken for one
            metric_type=kind,
            metric_name=FIGURES[figure],
            metric_value=round(evaluation.figures[figure], 6),
        )
        for evaluation in evaluations
        for figure, kind in INDEXED.items()
        if figure in evaluation.figures
    ]
