"""Draw the stability study: counterparts of Figures 2, 3 and 5 of arXiv:2511.20718.

    python scripts/plot_stability.py runs/stability/results.csv --output runs/stability

Lines are means over seeds, bands reach from the lowest to the highest of them.
"""

from __future__ import annotations

import argparse
import csv
import gzip
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from trl_stppo.watch.curves import COLOURS
from trl_stppo.watch.line_ends import label_ends

Row = dict[str, str]
Level = tuple[str, str]  # pressure, learning rate
METHODS = ("ppo", "turn-ppo", "s-ppo", "st-ppo", "grpo", "gspo", "st-grpo")
STYLES = {method: {"color": colour} for method, colour in zip(METHODS, COLOURS, strict=True)}
SUCCESS = "episode/success_rate"
HEADLINE = METHODS[:4]
HEADINGS = {"none": "on-policy", "both": "8 epochs on rollouts 4 updates old"}
# Figure, its label, and whether its axis is logarithmic.
SIGNALS = (
    (SUCCESS, "success rate (training)", False),
    ("policy/clip_fraction", "clipped tokens, share", False),
    ("policy/approx_kl", "KL to the old policy, nats", True),
    ("clip_bias/grad_norm", "norm of the gradient g", True),
    ("clip_bias/norm", "norm of the clipping bias C", True),
    ("clip_bias/cosine", "cosine of g and C", False),
)
# Below this a logarithmic axis shows nothing of interest.
FLOOR = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="the table that benchmarks/stability.py writes")
    parser.add_argument("--output", type=Path, default=Path("runs/stability"))
    args = parser.parse_args()
    if not args.results.is_file():
        parser.error(f"{args.results} does not exist; run benchmarks/stability.py first")
    opened = gzip.open if args.results.suffix == ".gz" else open
    with opened(args.results, "rt", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["estimator"] == "exact"]
    args.output.mkdir(parents=True, exist_ok=True)
    drawings = {"success": draw_success, "collapse": draw_collapse, "clipping": draw_clipping}
    drawings |= {"estimate": draw_estimate, "headline": draw_headline}
    for name, draw in drawings.items():
        stages = ("second",) if draw is draw_headline else ("test", "demo")
        shown = [row for row in rows if row["stage"] in stages]
        figure = draw(shown) if shown else None
        if figure is None:
            print(f"{name}: nothing to draw yet")
            continue
        path = args.output / f"{name}.png"
        figure.savefig(path, dpi=165 if draw is draw_headline else 110)
        plt.close(figure)
        print(path)


def levels(rows: Sequence[Row], stage: str = "test") -> list[Level]:
    """Pressures of a stage, from none to most."""
    found = {(r["pressure"], r["learning_rate"]) for r in rows if r["stage"] == stage}
    order = ("none", "epochs", "stale", "both")
    return sorted(found, key=lambda level: (float(level[1]), order.index(level[0])))


def curves(rows: Sequence[Row], **wanted: str) -> Callable[[str], list[tuple[int, list[float]]]]:
    """Per figure the update and its values over seeds, of the runs that match."""
    kept = [
        row
        for row in rows
        if row["phase"] == "train" and all(row[key] == value for key, value in wanted.items())
    ]

    def of(name: str) -> list[tuple[int, list[float]]]:
        points: dict[int, list[float]] = {}
        for row in kept:
            if row[name]:
                points.setdefault(int(row["update"]), []).append(float(row[name]))
        return sorted(points.items())

    return of


def draw_line(axis: Any, points: list[tuple[int, list[float]]], log: bool, **style: Any) -> None:
    """Mean and range over seeds."""
    if not points:
        return
    updates = [update for update, _ in points]
    least = FLOOR if log else float("-inf")
    means = [max(least, sum(values) / len(values)) for _, values in points]
    axis.plot(updates, means, linewidth=1.4, **style)
    low = [max(least, min(values)) for _, values in points]
    high = [max(least, max(values)) for _, values in points]
    axis.fill_between(updates, low, high, alpha=0.12, color=style.get("color"), linewidth=0)
    if log:
        axis.set_yscale("log")


def grid(rows: int, columns: int) -> tuple[Any, Any]:
    """Panels, updates along x."""
    size = (3.6 * columns, 2.9 * rows + 0.5)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("update (rollout batch)")
    return figure, axes


def add_legend(figure: Any, axes: Any) -> None:
    """One for all panels."""
    entries = {}
    for axis in axes.flat:
        handles, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    columns = min(7, max(3, 60 // max(map(len, entries), default=1)))
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns)


def title_of(level: Level) -> str:
    return f"pressure: {level[0]}, learning rate {float(level[1]):.2g}"


def draw_success(rows: Sequence[Row]) -> Any:
    """Success level by level, with a critic above and without below; Figure 2."""
    panels = [("test", level) for level in levels(rows)]
    panels += [("demo", level) for level in levels(rows, "demo")]
    figure, axes = grid(2, len(panels))
    for column, (stage, level) in enumerate(panels):
        for row, methods in enumerate((METHODS[:4], METHODS[4:])):
            axis = axes[row][column]
            for method in methods:
                of = curves(
                    rows, stage=stage, pressure=level[0], learning_rate=level[1], method=method
                )
                draw_line(axis, of(SUCCESS), False, label=method, **STYLES[method])
            axis.set_ylim(-0.02, 1.02)
            if not axis.lines:
                axis.text(0.5, 0.5, "not run", ha="center", transform=axis.transAxes)
        name = "demo task, " if stage == "demo" else ""
        axes[0][column].set_title(name + title_of(level), fontsize=9)
    for row in axes:
        row[0].set_ylabel("success rate (training)")
    figure.suptitle("Success while training (counterpart of the paper's Figure 2)", fontsize=11)
    add_legend(figure, axes)
    return figure


def draw_headline(rows: Sequence[Row]) -> Any:
    """No pressure beside all of it, on the second set of seeds; the README's picture."""
    found = levels(rows, "second")
    panels = [found[0], found[-1]]
    figure, axes = grid(1, len(panels))
    for axis, (pressure, rate) in zip(axes[0], panels, strict=True):
        ends = []
        for method in HEADLINE:
            of = curves(rows, stage="second", pressure=pressure, learning_rate=rate, method=method)
            draw_line(axis, of(SUCCESS), False, **STYLES[method])
            ends += [(update, sum(values) / len(values)) for update, values in of(SUCCESS)[-1:]]
        axis.set_ylim(-0.02, 1.02)
        axis.set_title(f"{HEADINGS[pressure]}\nlearning rate {float(rate):g}", fontsize=9)
    axes[0][0].set_ylabel("success rate (training)")
    label_ends(axes[0][-1], ends, HEADLINE, list(STYLES.values()))
    return figure


def draw_collapse(rows: Sequence[Row]) -> Any:
    """What token PPO's updates look like with more and more pressure; Figure 3."""
    figure, axes = grid(2, 3)
    colours = plt.get_cmap("viridis")
    found = levels(rows)
    for axis, (name, label, log) in zip(axes.flat, SIGNALS, strict=True):
        for i, level in enumerate(found):
            of = curves(rows, stage="test", pressure=level[0], learning_rate=level[1], method="ppo")
            colour = colours(i / max(1, len(found) - 1) * 0.85)
            draw_line(axis, of(name), log, label=title_of(level), color=colour)
        axis.set_ylabel(label)
    figure.suptitle("Token PPO under pressure (counterpart of the paper's Figure 3)", fontsize=11)
    add_legend(figure, axes)
    return figure


def draw_clipping(rows: Sequence[Row]) -> Any:
    """Clipping and KL of the variants, level by level; Figure 5."""
    found = levels(rows)
    figure, axes = grid(2, len(found))
    for column, level in enumerate(found):
        for row, (name, label, log) in enumerate(SIGNALS[1:3]):
            axis = axes[row][column]
            for method in METHODS:
                of = curves(
                    rows, stage="test", pressure=level[0], learning_rate=level[1], method=method
                )
                draw_line(axis, of(name), log, label=method, **STYLES[method])
            axes[row][0].set_ylabel(label)
        axes[0][column].set_title(title_of(level), fontsize=9)
    figure.suptitle("Clipping and KL (counterpart of the paper's Figure 5)", fontsize=11)
    add_legend(figure, axes)
    return figure


def draw_estimate(rows: Sequence[Row]) -> Any:
    """The kept part's share of the norms, estimated against exact."""
    figure, axes = grid(1, 1)
    axis = axes[0][0]
    for method in METHODS:
        pairs = [
            (exact_share(row), float(row["clip_bias/estimated_share"]))
            for row in rows
            if row["phase"] == "train"
            and row["method"] == method
            and row["clip_bias/estimated_share"]
        ]
        if pairs:
            axis.scatter(*zip(*pairs, strict=True), s=4, alpha=0.4, **STYLES[method], label=method)
    axis.plot([0, 1], [0, 1], color="black", linewidth=0.8)
    axis.set_xlabel("exact |g| / (|g| + |C|), mean of an update")
    axis.set_ylabel("estimated from the logits")
    axis.legend(fontsize=7)
    return figure


def exact_share(row: Row) -> float:
    kept, bias = float(row["clip_bias/grad_norm"]), float(row["clip_bias/norm"])
    return kept / (kept + bias) if kept + bias else 1.0


if __name__ == "__main__":
    main()
