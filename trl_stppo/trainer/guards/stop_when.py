"""Conditions on logged metrics that end a run: what `stop_when` may hold, and the counting."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import Tensor

PATIENCE = 5
ALLOWED = (
    "A condition is a text such as 'reward_std < 0.01 for 5', or a mapping {metric: reward_std, below: "
    "0.01, patience: 5} (or `above`); the patience may be left out and is 5 then"
)
# What transformers alone knows, once it logs.
OF_LOGS = ("loss", "grad_norm", "learning_rate")
# Metrics of the update, which a step of the critic alone, or one that is skipped, is without.
_OF_UPDATES = ("policy/", "value/", "clip_bias/", "perf/", "kl", "aux_loss")
_TEXT = re.compile(r"\s*([^<>]*[^\s<>])\s*([<>])\s*([^\s<>]+)(?:\s+for\s+(\S+))?\s*")


class Condition(NamedTuple):
    """A metric that is on the wrong side of a limit several times in a row.

    Attributes:
        metric: as it is logged.
        below: whether below the limit is the wrong side; else above it.
        limit: itself on the right side, in the metric's unit.
        patience: how often in a row.
    """

    metric: str
    below: bool
    limit: float
    patience: int = PATIENCE

    def __str__(self) -> str:
        return f"{self.metric} {'<' if self.below else '>'} {self.limit:.12g} for {self.patience}"


def conditions(stop_when: Any) -> list[Condition]:
    """What `stop_when` says.

    Args:
        stop_when: a text, a mapping, or a list of such; None for none.

    Raises:
        ValueError: it is none of these.
    """
    if stop_when is None:
        return []
    entries = stop_when if isinstance(stop_when, list | tuple) else [stop_when]
    return list(dict.fromkeys(_condition(entry) for entry in entries))


def texts(stop_when: Any) -> list[str] | None:
    """The setting as plain texts, however it was written; None for none."""
    return [str(condition) for condition in conditions(stop_when)] or None


def _condition(entry: Any) -> Condition:
    wrong = ValueError(f"`stop_when={entry!r}` cannot be read. {ALLOWED}.")
    if isinstance(entry, str):
        match = _TEXT.fullmatch(entry)
        if match is None:
            raise wrong
        metric, below = str(match[1]), match[2] == "<"
        limit, patience = match[3], match[4] or PATIENCE
    elif isinstance(entry, Mapping):
        sides = [side for side in ("below", "above") if side in entry]
        metric, below = str(entry.get("metric", "")).strip(), sides == ["below"]
        strange = set(entry) - {"metric", "patience", *sides}
        if len(sides) != 1 or strange or not re.fullmatch("[^<>]+", metric):
            raise wrong
        limit, patience = entry[sides[0]], entry.get("patience", PATIENCE)
    else:
        raise wrong
    try:
        found = Condition(metric, below, float(limit), int(patience))
    except (TypeError, ValueError) as error:
        raise wrong from error
    if not math.isfinite(found.limit):
        raise ValueError(f"`stop_when={entry!r}`: the limit must be a finite number.")
    if found.patience < 1 or found.patience != float(patience):
        raise ValueError(f"`stop_when={entry!r}`: the patience must be a whole number >= 1.")
    if metric.startswith("eval_"):
        raise ValueError(
            f"`stop_when={entry!r}` names a figure of evaluation, and watches the training alone. For "
            f"{metric!r} there is transformers' EarlyStoppingCallback."
        )
    return found


class StopWhen:
    """Counts how often in a row each condition has been met.

    Attributes:
        conditions: what it says.
        strikes: by condition whose metric has been seen, plain numbers for a checkpoint.
    """

    def __init__(self, stop_when: Any) -> None:
        self.conditions = conditions(stop_when)
        self.strikes: dict[str, int] = {}

    def load_strikes(self, saved: Mapping[str, int]) -> None:
        """Go on counting where a checkpoint was."""
        known = {str(condition) for condition in self.conditions}
        self.strikes = {name: count for name, count in saved.items() if name in known}

    def look(self, figures: Mapping[str, float], step: int, unit: str) -> str | None:
        """Take in new values, each of which counts once.

        Args:
            figures: by metric.
            step: the optimizer step that they belong to, for the message.
            unit: what they come one by one of, in the plural.

        Returns:
            Why the run is to stop; None while it may go on.
        """
        verdict = None
        for condition in self.conditions:
            value = figures.get(condition.metric)
            if value is None or math.isnan(value):
                continue
            name, limit = str(condition), condition.limit
            met = value < limit if condition.below else value > limit
            self.strikes[name] = self.strikes.get(name, 0) + 1 if met else 0
            if self.strikes[name] >= condition.patience:
                verdict = verdict or (
                    f"`stop_when={name!r}` was met by {condition.patience} {unit} in a row; the last "
                    f"value is {value:.4g}, {condition.metric} at step {step}"
                )
        return verdict

    def check_names(self, known: Collection[str], *, updated: bool) -> None:
        """Refuse a metric that this run does not log.

        Args:
            known: the names of a rollout batch and the optimizer step after it.
            updated: whether that step has trained the policy, so that all its metrics are there.

        Raises:
            ValueError: names the metrics that are like it.
        """
        for condition in self.conditions:
            name = condition.metric
            later = not updated and name.startswith(_OF_UPDATES)
            later |= name == "episode/success_rate"  # the first episodes may all be cut off
            if name in known or name in OF_LOGS or str(condition) in self.strikes or later:
                continue
            raise ValueError(
                f"`stop_when={str(condition)!r}` would never be met: this run does not log {name!r}."
            )


Sizes = dict[str, tuple[list[Any], int]]


def sizes(metrics: Mapping[str, list[Any]]) -> Sizes:
    """How long the metrics' lists are, to find out later what has been added."""
    return {name: (values, len(values)) for name, values in metrics.items()}


def added(metrics: Mapping[str, list[Any]], before: Sizes) -> dict[str, float]:
    """The newest value of each metric that has one since `before`."""
    new = {}
    for name, values in metrics.items():
        known, length = before.get(name, (None, 0))
        # Logging replaces the lists, and a new one may be as long as the old one was.
        if values and (known is not values or len(values) > length):
            new[name] = _number(values[-1])
    return new


def _number(value: float | Tensor | None) -> float:
    return math.nan if value is None else float(value)
