"""What the study runs in which order; each stage may look at those before it.

Pressures come from pilots of token PPO alone, the correction's settings from tuning seeds, and the test
runs on seeds that neither has seen.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from _stability_grid import (
    CORRECTIONS,
    LEARNING_RATES,
    METHODS,
    PILOT_SEEDS,
    PRESSURES,
    SECOND_SEEDS,
    TEST_SEEDS,
    TUNE_SEEDS,
    TURN_CLIP_RANGES,
    Cell,
    Table,
)
from _stability_report import estimate_agreement, summaries

Correction = tuple[str, float, str]
# Of the second task, whose configuration has this learning rate.
DEMO_RATE = 5e-4
SGD_RATES = (0.1, 0.3)


def cells_of(
    stage: str,
    methods: Iterable[str],
    level: tuple[str, float],
    seeds: Iterable[int],
    correction: Correction,
    task: str = "corridor",
) -> list[Cell]:
    """Runs of these methods under one pressure at one learning rate, seed by seed."""
    mode, power, target = correction
    cells = []
    for seed, method in itertools.product(seeds, methods):
        cell = Cell(stage, task, method, *level, seed)
        if METHODS[method][1]:
            cell = replace(cell, mode=mode, power=power, target=target)
        cells.append(cell)
    return cells


def pilot(table: Table, task: str = "corridor") -> list[Cell]:
    """Token PPO at all pressures and learning rates."""
    return [
        Cell("pilot", task, "ppo", pressure, rate, seed)
        for seed, pressure, rate in itertools.product(PILOT_SEEDS, PRESSURES, LEARNING_RATES)
    ]


def levels(table: Table, task: str = "corridor") -> dict[str, tuple[str, float]]:
    """Pressure and learning rate of the test's levels, from the pilots alone.

    `none`: at the rate at which token PPO then ends best. `threshold`: from that rate upward, the first
    pressure at which at least half of the pilots collapse. `extreme`: the grid's far corner.
    """
    found = {
        (entry["pressure"], float(entry["learning_rate"])): entry
        for entry in summaries(table)
        if (entry["stage"], entry["task"], entry["runs"]) == ("pilot", task, len(PILOT_SEEDS))
    }
    best = max(LEARNING_RATES, key=lambda rate: found["none", rate]["final"])
    result = {"none": ("none", best)}
    upward = [rate for rate in LEARNING_RATES if rate >= best]
    for rate, pressure in itertools.product(upward, list(PRESSURES)[1:]):
        entry = found[pressure, rate]
        if 2 * entry["collapsed"] >= entry["runs"]:
            result["threshold"] = (pressure, rate)
            break
    result["extreme"] = (list(PRESSURES)[-1], LEARNING_RATES[-1])
    return result


def tune(table: Table) -> list[Cell]:
    """Every correction at the threshold; those that may become the default at the other levels too."""
    at = levels(table)
    cells = []
    for name, level in at.items():
        cells += cells_of("tune", ["ppo", "turn-ppo"], level, TUNE_SEEDS, CORRECTIONS[0])
        for correction in CORRECTIONS if name == "threshold" else candidates():
            cells += cells_of("tune", ["st-ppo"], level, TUNE_SEEDS, correction)
    return sorted(cells, key=lambda cell: cell.seed)


def candidates() -> list[Correction]:
    """What acts under Adam, and the reading closest to the paper."""
    return [c for c in CORRECTIONS if c[2] == "update" or c[0] == "triggered"]


def chosen(table: Table) -> Correction:
    """The correction with the best final success, averaged over the levels of the tuning runs."""
    finals: dict[Correction, list[float]] = {}
    for entry in summaries(table):
        if entry["stage"] == "tune" and entry["mode"] != "none":
            key = (entry["mode"], float(entry["power"]), entry["target"])
            finals.setdefault(key, []).append(entry["final"])
    return max(candidates(), key=lambda correction: statistics.fmean(finals[correction]))


def test(table: Table) -> list[Cell]:
    """All methods under no, enough and too much pressure, on fresh seeds; the estimate beside them."""
    correction = chosen(table)
    with_critic = [name for name, method in METHODS.items() if method[2]]
    cells: list[Cell] = []
    for name, level in levels(table).items():
        methods = with_critic if name == "extreme" else list(METHODS)
        cells += cells_of("test", methods, level, TEST_SEEDS, correction)
        if name == "threshold":
            estimated = cells_of("test", ["st-ppo"], level, TEST_SEEDS, correction)
            cells += [replace(cell, estimator="logits") for cell in estimated]
    return sorted(cells, key=lambda cell: cell.seed)


def control(table: Table) -> list[Cell]:
    """Turn ratios alone at a constant rate, as large as the corrected runs' on average."""
    cells, found = [], summaries(table)
    for name, (pressure, rate) in levels(table).items():
        scale = next(
            entry["clip_bias/scale"]
            for entry in found
            if (entry["stage"], entry["method"], entry["pressure"], entry["estimator"])
            == ("test", "st-ppo", pressure, "exact")
            and float(entry["learning_rate"]) == rate
        )
        if name != "none":
            level = (pressure, float(f"{rate * scale:.3g}"))
            cells += cells_of("control", ["turn-ppo"], level, TEST_SEEDS, CORRECTIONS[0])
    return sorted(cells, key=lambda cell: cell.seed)


def ranges(table: Table) -> list[Cell]:
    """Turn ratios with narrower clip ranges, on tuning seeds."""
    at = levels(table)
    cells = []
    for name, width in itertools.product(("none", "threshold"), TURN_CLIP_RANGES):
        runs = cells_of("ranges", ["turn-ppo", "st-ppo"], at[name], TUNE_SEEDS, chosen(table))
        cells += [replace(cell, cliprange=width) for cell in runs]
    return sorted(cells, key=lambda cell: cell.seed)


def chosen_range(table: Table) -> float:
    """The clip range with which st-ppo ended best in `ranges`, averaged over its levels."""
    finals: dict[float, list[float]] = {}
    for entry in summaries(table):
        if entry["stage"] == "ranges" and entry["method"] == "st-ppo":
            finals.setdefault(float(entry["cliprange"]), []).append(entry["final"])
    return max(finals, key=lambda width: statistics.fmean(finals[width]))


def second(table: Table) -> list[Cell]:
    """The four variants once more, turn ratios with the narrower clip range, on other fresh seeds."""
    width = chosen_range(table)
    cells = []
    for level in levels(table).values():
        for cell in cells_of("second", list(METHODS)[:4], level, SECOND_SEEDS, chosen(table)):
            turns = METHODS[cell.method][0] == "turn"
            cells.append(replace(cell, cliprange=width) if turns else cell)
    return sorted(cells, key=lambda cell: cell.seed)


def demo(table: Table) -> list[Cell]:
    """The demo's agent, at its own learning rate, without and with pressure."""
    cells: list[Cell] = []
    for pressure, methods in (("none", ["ppo", "st-ppo"]), ("both", list(METHODS)[:4])):
        level = (pressure, DEMO_RATE)
        cells += cells_of("demo", methods, level, TEST_SEEDS, chosen(table), "demo")
    return sorted(cells, key=lambda cell: cell.seed)


def sgd(table: Table) -> list[Cell]:
    """Where a scale on the gradient is not divided out again."""
    pressure, _ = levels(table)["threshold"]
    cells: list[Cell] = []
    for rate in SGD_RATES:
        level = (pressure, rate)
        cells += cells_of("sgd", ["turn-ppo"], level, TUNE_SEEDS, CORRECTIONS[0])
        for correction in (CORRECTIONS[0], chosen(table)):
            cells += cells_of("sgd", ["st-ppo"], level, TUNE_SEEDS, correction)
    return [replace(cell, optimizer="sgd") for cell in sorted(cells, key=lambda cell: cell.seed)]


STAGES: dict[str, Callable[[Table], list[Cell]]] = {
    stage.__name__: stage for stage in (pilot, tune, test, control, demo, sgd, ranges, second)
}


def decisions(table: Table) -> dict[str, Any]:
    """What the stages so far have decided."""
    stages = {row["stage"] for row in table.rows}
    result: dict[str, Any] = {}
    if "pilot" in stages:
        result["levels"] = levels(table)
    if "tune" in stages:
        result["correction"] = chosen(table)
    if "ranges" in stages:
        result["turn_cliprange"] = chosen_range(table)
    if "test" in stages:
        result["estimate"] = estimate_agreement(table)
    return result
