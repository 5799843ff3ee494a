"""How hard off-policy training is made: levels that come from pilots of token PPO alone."""

from __future__ import annotations

import itertools

from _stability_grid import LEARNING_RATES, PILOT_SEEDS, PRESSURES, Cell, Table
from _stability_report import summaries


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
