"""The last evaluation of a run, out of its log, as a table and as the Hub's `model-index`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..watch.figures import SCORE, SUCCESS
from .markdown import escaped, table

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

PREFIX = "eval_"
# Figure of evaluation -> its name in the table; docs/evaluation.md explains them.
FIGURES = {
    SUCCESS: "success rate",
    SCORE: "score",
    "turns/mean": "turns per episode",
    "turns/valid_action_rate": "readable actions",
    "turns/tokens_mean": "tokens per turn",
    "episodes": "episodes",
}
# What goes into the model-index, as its kind of metric.
INDEXED = {SUCCESS: "success_rate", SCORE: "mean_reward"}


@dataclass(frozen=True)
class Evaluation:
    """The figures of one evaluation dataset, by the names of docs/evaluation.md.

    Attributes:
        name: of the dataset among several; None for the only one.
        step: optimizer steps that were done.
        figures: its figures, without prefix.
    """

    name: str | None
    step: int
    figures: Mapping[str, float]


def last_evaluations(history: Sequence[Mapping[str, Any]]) -> list[Evaluation]:
    """The evaluations at the last step at which there was one."""
    entries = [entry for entry in history if any(_ends_in_score(key) for key in entry)]
    if not entries:
        return []
    last = entries[-1].get("step", 0)
    found: dict[str, dict[str, float]] = {}
    for entry in (e for e in entries if e.get("step", 0) == last):
        for prefix in [k.removesuffix(SCORE) for k in entry if _ends_in_score(k)]:
            found[prefix] = {
                key.removeprefix(prefix): float(value)
                for key, value in entry.items()
                if key.startswith(prefix) and _is_number(value)
            }
    return [
        Evaluation(prefix.removeprefix(PREFIX).removesuffix("_") or None, int(last), figures)
        for prefix, figures in found.items()
    ]


def _ends_in_score(key: str) -> bool:
    return key.startswith(PREFIX) and key.endswith(SCORE)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def results_table(evaluations: Sequence[Evaluation]) -> str:
    """Figures in rows, evaluation datasets in columns; empty without an evaluation."""
    rows = []
    for figure, label in FIGURES.items():
        cells = [_shown(evaluation.figures, figure) for evaluation in evaluations]
        if any(cells):
            rows.append([label, *cells])
    heads = [escaped(e.name, 60) if e.name else "held-out rows" for e in evaluations]
    return table(["", *heads], rows)


def _shown(figures: Mapping[str, float], name: str) -> str:
    value = figures.get(name)
    if value is None or math.isnan(value):
        return ""
    if float(value).is_integer() and abs(value) >= 2:
        return f"{value:.0f}"
    low, high = figures.get(f"{name}_low", math.nan), figures.get(f"{name}_high", math.nan)
    interval = "" if math.isnan(low) or math.isnan(high) else f" ({low:.3f} to {high:.3f})"
    return f"{value:.3f}{interval}"


def model_index(evaluations: Sequence[Evaluation], data: str) -> list[EvalResult]:
    """The figures that compare across models, in the Hub's form.

    Args:
        evaluations: of the run.
        data: what was played where a dataset has no name.
    """
    from huggingface_hub import EvalResult

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
        if not math.isnan(evaluation.figures.get(figure, math.nan))
    ]
