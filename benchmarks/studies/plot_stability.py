"""Draw the study of stabilisers, from its recorded runs.

    python benchmarks/studies/plot_stability.py [--output docs/figures]

headline.png  success while training, far off policy: share, with winners, token PPO, TRL's GRPO
start.png     the first rollouts of a tool agent with long turns: the default, the one before, TRL's GRPO
symptoms.png  four metrics of the same runs: what a collapse looks like in the log
rivals.png    final success of the twelve best rivals of the first stage and of token PPO, best first
sweep.png     final success at learning rates from far too small to far too large
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Record = dict[str, Any]
RECORDED = Path(__file__).parent / "rivals.jsonl.gz"
SOLVED = Path(__file__).parent / "solved.jsonl.gz"
STARTED = Path(__file__).parent / "start.jsonl.gz"
SUCCESS, WINDOW = "episode/success_rate", 3
# Name of the study -> name in all pictures.
ARMS = {
    "share": "ST-PPO (share)",
    "winners+share-logits": "ST-PPO (winners + share)",
    "token": "token PPO",
}
NAMES = ARMS | {
    "winners+share": "winners + share, exact norms",
    "share-logits": "share, estimated norms",
    "turn": "turn ratio alone",
    "kl-0.003": "rate by the KL (kl-0.003)",
    "ess": "rate by the sample size (ess)",
}
GRPO = {"trl-grpo": "TRL's GRPO, fresh rollouts"}
STARTS = {
    "spread": "ST-PPO, the default",
    "grpo": "TRL's GRPO",
    "grpo-4": "TRL's GRPO, four epochs",
}
SYMPTOMS = {
    SUCCESS: "success rate (training)",
    "policy/clip_fraction": "policy/clip_fraction",
    "policy/approx_kl": "policy/approx_kl (nats, log)",
    "policy/entropy": "policy/entropy (nats)",
}
LEVELS = ("threshold", "extreme")
PRESSURES = {"epochs": "4 epochs", "both": "8 epochs on rollouts 4 updates old"}
TASKS = ("corridor", "demo", "textworld")
STYLES = [{"color": f"C{number}"} for number in range(10)]


def recorded() -> list[Record]:
    """All runs; those of TRL's GRPO stand in the study of solved tasks, at `threshold`."""
    with gzip.open(RECORDED, "rt") as file:
        records = [json.loads(line) for line in file]
    with gzip.open(SOLVED, "rt") as file:
        for record in map(json.loads, file):
            if record["key"][0] == "grpo":
                record |= {"key": ["test", *record["key"][1:]], "level": "threshold"}
                records.append(record)
    return records


def smooth(curve: Sequence[float | None]) -> list[float]:
    """Mean of the last three updates; 0 where a run has died."""
    whole = [value or 0.0 for value in curve]
    return [statistics.fmean(whole[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(whole))]


def curves(
    records: Sequence[Record], task: str, level: str, arm: str, metric: str = SUCCESS
) -> list[list[float]]:
    """A metric of the test's runs, update by update."""
    keys = ["test", task, arm]
    return [
        smooth(record["curves"][metric])
        for record in records
        if record["key"][:3] == keys and record["level"] == level
    ]


def pressure(records: Sequence[Record], task: str, level: str) -> str:
    """What a level is on a task."""
    at = (task, level)
    return next(PRESSURES[r["key"][3]] for r in records if (r["key"][1], r["level"]) == at)


def draw_band(axis: Any, runs: Sequence[Sequence[float]], label: str, style: Record) -> None:
    """A line through the mean of the runs; its band leaves out the best and the worst one."""
    points = list(zip(*runs, strict=True))
    updates = range(1, len(points) + 1)
    axis.plot(updates, [statistics.fmean(p) for p in points], linewidth=1.8, label=label, **style)
    bounds = [sorted(point) for point in points]
    low, high = ([b[i] for b in bounds] for i in (1, -2))
    axis.fill_between(updates, low, high, alpha=0.15, linewidth=0, **style)


def draw_headline(records: Sequence[Record]) -> Any:
    """One panel per task, at the highest pressure that all arms have run; GRPO if it has run there."""
    tried = [r["key"][1] for r in records if r["key"][2] in GRPO]
    drawn = {task: ARMS | GRPO if task in tried else ARMS for task in TASKS}
    panels = {
        task: level
        for task in TASKS
        for level in LEVELS
        if all(len(curves(records, task, level, arm)) >= 5 for arm in drawn[task])
    }
    figure, axes = plt.subplots(
        1, len(panels), figsize=(3.1 * len(panels) + 1.6, 3.2), layout="constrained", sharey=True
    )
    for axis, (task, level) in zip(axes, panels.items(), strict=True):
        for style, arm in zip(STYLES, drawn[task], strict=False):
            draw_band(axis, curves(records, task, level, arm), drawn[task][arm], style)
        axis.set_ylim(-0.02, 1.02)
        axis.grid(alpha=0.3)
        axis.set_title(f"{task}\n{pressure(records, task, level)}", fontsize=9)
        axis.set_xlabel("update (rollout batch)")
    axes[0].set_ylabel("success rate (training)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, ncols=4, loc="outside lower center")
    return figure


def draw_start(_: Sequence[Record]) -> Any:
    """A panel per learning rate: rewards of the study of beginnings, a line per seed."""
    runs: dict[tuple[str, float, int], Record] = {}  # some stand in two stages
    with gzip.open(STARTED, "rt") as file:
        for run in map(json.loads, file):
            cell = run["cell"]
            if cell["stage"] in ("house", "speed") and run["key"][2] in STARTS:
                runs.setdefault((run["key"][2], cell["learning_rate"], cell["seed"]), run)
    rates = sorted({rate for _, rate, _ in runs})
    form = {"sharey": True, "squeeze": False, "layout": "constrained"}
    figure, axes = plt.subplots(1, len(rates), figsize=(2.4 * len(rates) + 1, 3.2), **form)
    for axis, rate in zip(axes[0], rates, strict=True):
        for (arm, label), color in zip(STARTS.items(), ("C0", "C3", "C1"), strict=True):
            lines = [
                smooth(r["curves"][SUCCESS]) for key, r in runs.items() if key[:2] == (arm, rate)
            ]
            for number, line in enumerate(lines):
                name = None if number else label
                axis.plot(range(1, len(line) + 1), line, color=color, linewidth=1.2, label=name)
        axis.set_title(f"learning rate {rate:g}", fontsize=9)
        axis.set_xlabel("rollout")
        axis.set_ylim(-0.02, 1.02)
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("mean reward")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, ncols=3, loc="outside lower center")
    return figure


def draw_symptoms(records: Sequence[Record]) -> Any:
    """A panel per metric, on TextWorld at `threshold`."""
    figure, axes = plt.subplots(2, 2, figsize=(7.2, 4.6), layout="constrained", sharex=True)
    for axis, (metric, title) in zip(axes.flat, SYMPTOMS.items(), strict=True):
        for style, (arm, label) in zip(STYLES, ARMS.items(), strict=False):
            draw_band(axis, curves(records, "textworld", "threshold", arm, metric), label, style)
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
    axes[1, 0].set_yscale("log")
    for axis in axes[1]:
        axis.set_xlabel("update (rollout batch)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, ncols=3, loc="outside lower center")
    return figure


def finals(records: Sequence[Record]) -> Iterator[tuple[str, dict[str, float]]]:
    """Each rival of the first stage, with its mean final success per task and level."""
    cells: dict[str, dict[str, list[float]]] = {}
    for record in records:
        stage, task, arm, *_ = record["key"]
        if stage == "first":
            final = 0.0 if record["error"] else record["test"][-1]
            own = cells.setdefault(arm, {})
            own.setdefault(f"{task}, {record['level']}", []).append(final)
    for arm, own in cells.items():
        yield arm, {cell: statistics.fmean(values) for cell, values in own.items()}


def draw_rivals(records: Sequence[Record]) -> Any:
    """A row per rival that ran on both tasks, a dot per cell; the best twelve, and token PPO."""
    on_both = [line for line in finals(records) if len(line[1]) == 4]
    ranked = sorted(on_both, key=lambda line: statistics.fmean(line[1].values()))
    ranked = [line for line in ranked[:-12] if line[0] == "token"] + ranked[-12:]
    cells = list(ranked[-1][1])
    figure, axis = plt.subplots(figsize=(7, 0.21 * len(ranked) + 1), layout="constrained")
    for style, marker, cell in zip(STYLES, "o^sD", cells, strict=False):
        points = [(means[cell], y) for y, (_, means) in enumerate(ranked) if cell in means]
        axis.scatter(*zip(*points, strict=True), s=22, marker=marker, label=cell, **style)
    axis.set_yticks(range(len(ranked)), [NAMES.get(arm, arm) for arm, _ in ranked], fontsize=8)
    axis.set_ylim(-1, len(ranked))
    axis.set_xlabel("final success on held-out episodes, mean of three seeds")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="center left")
    return figure


def draw_sweep(records: Sequence[Record]) -> Any:
    """A line per rival through the means of its seeds, which are dots."""
    swept: dict[str, dict[float, list[float]]] = {}
    for record in records:
        stage, _, arm, _, rate, _ = record["key"]
        if stage == "sweep":
            final = 0.0 if record["error"] else record["test"][-1]
            swept.setdefault(arm, {}).setdefault(float(rate), []).append(final)
    figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
    names = sorted(swept, key=[*ARMS, *swept].index)  # in the headline's colours
    for style, name in zip(STYLES, names, strict=False):
        by_rate = swept[name]
        rates = sorted(by_rate)
        means = [statistics.fmean(by_rate[rate]) for rate in rates]
        dots = [(rate, final) for rate in rates for final in by_rate[rate]]
        axis.scatter(*zip(*dots, strict=True), s=8, alpha=0.5, **style)
        axis.plot(rates, means, linewidth=1.8, label=NAMES.get(name, name), **style)
    axis.set_xscale("log")
    axis.set_ylim(-0.02, 1.02)
    axis.grid(alpha=0.3)
    axis.set_title("corridor, 4 epochs", fontsize=9)
    axis.set_xlabel("learning rate")
    axis.set_ylabel("final success, held-out episodes")
    axis.legend(fontsize=8)
    return figure


def main() -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("docs/figures"))
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    records = recorded()
    for name, draw in {
        "headline": draw_headline,
        "start": draw_start,
        "symptoms": draw_symptoms,
        "rivals": draw_rivals,
        "sweep": draw_sweep,
    }.items():
        figure = draw(records)
        figure.savefig(folder / f"{name}.png", dpi=130)
        plt.close(figure)
        print(folder / f"{name}.png")


if __name__ == "__main__":
    main()
