"""The picture of the practitioner's study: means over seeds, intervals of 90 %."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from _rivals_stages import Record
from _stability_grid import SUCCESS

METHODS = ("ppo", "st-ppo", "grpo", "rloo", "rebn")
REWARDS = {"sparse": "tab:blue", "dense": "tab:orange"}
WORLDS = {"easy": "tab:green", "hard": "tab:red"}
STYLES = {"ppo": "-", "grpo": "--", "rloo": ":"}
ASIDE = (-0.12, 0.12)
Line = dict[str, Any]
Lines = dict[tuple[str, str, str, int], Line]


def draw(table: list[Line], runs: list[Record], path: Path) -> None:
    """Four panels, of what has been run.

    Args:
        table: of `_practitioner_report.report`.
        runs: for the curves.
        path: of the picture.
    """
    figure, axes = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained")
    names = ("world", "reward", "method", "demonstrations")
    lines: Lines = {tuple(line[name] for name in names): line for line in table}  # type: ignore[misc]
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.set_ylim(0, 1.02)
        axis.set_ylabel("success")
    ends, curves, worlds, budgets = axes.flat
    draw_ends(ends, lines)
    draw_curves(curves, runs)
    draw_worlds(worlds, lines)
    draw_budgets(budgets, lines)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def point(axis: Any, x: float, line: Line, name: str = "final", **style: Any) -> None:
    """A mean and its interval."""
    mean, low, high = (line[key] for key in (name, f"{name}_low", f"{name}_high"))
    axis.errorbar(x, mean, [[mean - low], [high - mean]], fmt="o", capsize=4, **style)


def draw_ends(axis: Any, lines: Lines) -> None:
    """Both rewards, method by method."""
    for (index, method), (shift, reward) in itertools.product(
        enumerate(METHODS), zip(ASIDE, REWARDS, strict=True)
    ):
        line = lines.get(("easy", reward, method, 0))
        if line:
            label = None if index else reward
            point(axis, index + shift, line, color=REWARDS[reward], label=label)
            axis.hlines(line["start"], index - 0.3, index + 0.3, "grey", "dashed")
    axis.set_xticks(range(len(METHODS)), METHODS)
    axis.set_title("held-out games after 20 updates (dashed: before)", fontsize=10)
    axis.legend(loc="lower right", fontsize=8)


def draw_curves(axis: Any, runs: list[Record]) -> None:
    """How fast: the methods that the guide speaks of."""
    for method, reward in itertools.product(STYLES, REWARDS):
        key = ["easy", reward, method, "0"]
        found = [run["curves"][SUCCESS] for run in runs if run["key"][:4] == key]
        mean = [statistics.fmean(values) for values in zip(*found, strict=False)]
        if mean:
            style = {"color": REWARDS[reward], "linestyle": STYLES[method]}
            axis.plot(range(1, len(mean) + 1), mean, label=f"{method}, {reward}", **style)
    axis.set_title("rollouts", fontsize=10)
    axis.set_xlabel("update")
    axis.legend(loc="lower right", fontsize=8)


def draw_worlds(axis: Any, lines: Lines) -> None:
    """Each world's agent in both."""
    for (index, played), (shift, trained) in itertools.product(
        enumerate(WORLDS), zip(ASIDE, WORLDS, strict=True)
    ):
        line = lines.get((trained, "sparse", "ppo", 0), {})
        name, label = "final" if trained == played else "visit", f"trained on the {trained} one"
        if name in line:
            style = {"color": WORLDS[trained], "label": None if index else label}
            point(axis, index + shift, line, name, **style)
            before = line["start" if name == "final" else "visit_before"]
            axis.hlines(before, index - 0.3, index + 0.3, "grey", "dashed")
    axis.set_xticks(range(2), [f"{world} world" for world in WORLDS])
    axis.set_xlim(-0.6, 1.6)
    axis.set_title("ppo with sparse rewards (dashed: before)", fontsize=10)
    axis.legend(loc="upper right", fontsize=8)


def draw_budgets(axis: Any, lines: Lines) -> None:
    """More and more demonstrations."""
    shares = {}
    for (*kind, demonstrations), line in lines.items():
        if kind == ["easy", "sparse", "ppo"]:
            point(axis, demonstrations, line, color="tab:purple")
            shares[demonstrations] = f"{demonstrations}\n{(640 - 10 * demonstrations) // 32}"
    axis.set_xticks([*shares], shares.values())
    axis.set_xlabel("demonstrations, then updates of ppo with sparse rewards")
    axis.set_title("640 episodes, a demonstration counting ten", fontsize=10)
