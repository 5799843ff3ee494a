"""Second half of the study of rivals: twins, the test on fresh seeds, the sweep of rates, the verdict.

A rival's twin is the turn ratio alone at the constant rate at which the policy moves as far per update, in
the L2 norm, as under the rival: what a user would get by tuning the rate. `rivals.md` has the rules.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from _rivals_stages import (
    CANDIDATES,
    LEVELS,
    Record,
    Records,
    Trial,
    base_of,
    levels,
    parts_of,
    rows_of,
    survivors,
    table_of,
    trial,
)
from _stability_grid import TUNE_SEEDS
from _stability_report import bootstrap, judge

TEST_SEEDS, MORE_SEEDS, SWEEP_SEEDS = range(400, 410), range(410, 420), range(420, 423)
QUIET = ("none", "overlap")
SWEEP_RATES = (1e-4, 3e-4, 5.5e-4, 1e-3, 3e-3)
NEAR, TRIES = 0.05, 8  # relative error of a twin's movement; rates tried for it
MOVEMENT = "study/movement"

# ------------------------------------------------------------------------------------ who


def finalists(records: Records) -> list[str]:
    """Winner and runner-up of the first stage.

    Raises:
        ValueError: the stage has not been run.
    """
    chosen = survivors(table_of(records))[:2]
    if len(chosen) < 2:
        raise ValueError("the first stage has no two survivors yet; run it before its test")
    return chosen


def contestants(records: Records) -> list[str]:
    """Who takes part in the test: finalists, references, the best of the rates' and of the ESS rivals."""
    arms = finalists(records)
    ranked = [line["arm"] for line in table_of(records)]
    for names in ({"kl"}, {"ess"}, {"ess-turns"}, {"ess", "tis"}):
        arms += [a for a in ranked if a in CANDIDATES and set(parts_of(a)) == names][:1]
    sizes = [a for a in arms[2:] if "kl" not in parts_of(a)]
    dropped = set(sorted(sizes, key=ranked.index)[1:])
    return list(dict.fromkeys([*(a for a in arms if a not in dropped), "share", "token"]))


# ---------------------------------------------------------------------------------- twins


def movement(records: Records, task: str, arm: str, level: tuple[str, float]) -> float | None:
    """Mean movement on the tuning seeds; None unless all of them are there."""
    at = (task, arm, level[0], str(level[1]))
    found: dict[int, float] = {}
    for record in records.rows:
        stage, *key, seed = record["key"]
        if stage in ("first", "tuning") and tuple(key) == at and int(seed) in TUNE_SEEDS:
            steps = [x for x in record["curves"].get(MOVEMENT, []) if x is not None]
            found[int(seed)] = statistics.fmean(steps) if steps else math.nan
    values = [x for x in found.values() if not math.isnan(x)]
    return statistics.fmean(values) if len(found) == len(TUNE_SEEDS) and values else None


def twin(records: Records, task: str, arm: str, name: str) -> tuple[float, bool]:
    """The rate of a rival's twin, and whether it is found or still to be tried."""
    level = levels(records, task)[name]
    target = movement(records, task, arm, level)
    if target is None:
        raise ValueError(f"{arm} has not been run on {task}, {name}, with the tuning seeds")
    rates = {float(r["key"][4]) for r in records.rows if r["key"][1:4] == [task, "turn", level[0]]}
    tried = {rate: movement(records, task, "turn", (level[0], rate)) for rate in rates}
    known = {rate: moved for rate, moved in tried.items() if moved}
    if not known:
        return level[1], False
    best = min(known, key=lambda rate: abs(math.log(known[rate] / target)))
    if abs(known[best] / target - 1.0) <= NEAR or len(known) > TRIES:
        return best, True
    return _next_rate(known, target), False


def _next_rate(known: dict[float, float], target: float) -> float:
    """On a line through two logarithms, around the target if there are such; proportional to one."""
    wanted = math.log(target)
    points = [(math.log(moved) - wanted, math.log(rate)) for rate, moved in known.items()]
    points.sort(key=lambda point: abs(point[0]))
    (x0, y0), *others = points
    x1, y1 = next((p for p in others if p[0] * x0 < 0), others[0] if others else (x0, y0))
    # Noise may give two rates the same movement, or the smaller one the larger.
    slope = (y1 - y0) / (x1 - x0) if x1 != x0 else 1.0
    log_rate = y0 - min(max(slope, 0.3), 3.0) * x0
    rate = float(f"{math.exp(log_rate):.3g}")
    while rate in known:  # a noisy curve may send us back to where we were
        rate = float(f"{rate * 1.03:.3g}")
    return rate


def tuning(records: Records, task: str) -> list[Trial]:
    """The next runs on tuning seeds: rivals that lack them, then rates for their twins."""
    at, jobs = levels(records, task), list[Trial]()
    for arm, name in itertools.product(finalists(records), LEVELS):
        if movement(records, task, arm, at[name]) is None:
            jobs += _runs("tuning", records, task, arm, name, at[name], TUNE_SEEDS)
            continue
        rate, settled = twin(records, task, arm, name)
        if not settled:
            jobs += _runs("tuning", records, task, "turn", name, (at[name][0], rate), TUNE_SEEDS)
    return list({job.key: job for job in jobs}.values())


def _runs(
    stage: str,
    records: Records,
    task: str,
    arm: str,
    name: str,
    level: tuple[str, float],
    seeds: Sequence[int],
) -> list[Trial]:
    base = base_of(records, task, arm)
    return [trial(stage, task, arm, name, level, seed, base) for seed in seeds]


# ----------------------------------------------------------------------------------- test


def test(records: Records, task: str) -> list[Trial]:
    """What is confirmed first, then what is wanted of a default, then the others."""
    at, jobs = levels(records, task), list[Trial]()
    winner, second = finalists(records)

    def add(arm: str, name: str, seeds: Sequence[int], rate: float | None = None) -> None:
        level = (at[name][0], rate or at[name][1])
        jobs.extend(_runs("test", records, task, arm, name, level, seeds))

    for arm in (winner, second):
        for name in LEVELS:
            add(arm, name, TEST_SEEDS)
            add("turn", name, TEST_SEEDS, twin(records, task, arm, name)[0])
        if arm == winner:
            for name, quiet in itertools.product(QUIET, (winner, "token")):
                add(quiet, name, [*TEST_SEEDS, *MORE_SEEDS])
    for arm, name in itertools.product(contestants(records), (*LEVELS, *QUIET)):
        add(arm, name, TEST_SEEDS)
    return list({job.key: job for job in jobs}.values())


def sweep(records: Records, task: str) -> list[Trial]:
    """The corridor's threshold at rates from far too small to far too large."""
    if task != "corridor":
        return []
    pressure = levels(records, task)["threshold"][0]
    arms = dict.fromkeys([finalists(records)[0], *contestants(records), "turn"])
    return [
        job
        for arm, rate in itertools.product(arms, SWEEP_RATES)
        for job in _runs("sweep", records, task, arm, "sweep", (pressure, rate), SWEEP_SEEDS)
    ]


def groups(records: Records, task: str) -> list[Trial]:
    """Without a critic: the package's own stabilizers, on groups of episodes."""
    if task != "corridor":
        return []
    at, arms = levels(records, task), ("share", "winners+share")
    jobs = [
        trial("groups", task, arm, name, at[name], seed)
        for seed, name, arm in itertools.product(TEST_SEEDS[:5], LEVELS, arms)
    ]
    return [replace(job, cell=replace(job.cell, method="st-grpo")) for job in jobs]


# -------------------------------------------------------------------------------- verdict


def finals(
    records: Records, stage: str, task: str, arm: str, level: tuple[str, float]
) -> dict[int, float]:
    """Final success by seed."""
    at = [stage, task, arm, level[0], str(level[1])]
    rows = [r for r in records.rows if r["key"][:5] == at]
    return {int(r["key"][5]): judge(rows_of(r))["final"] for r in rows}


def sign_flip(differences: Sequence[float]) -> float:
    """Exact two-sided p-value of the mean of paired differences, over all signs."""
    whole = abs(math.fsum(differences))
    flips = itertools.product((1.0, -1.0), repeat=len(differences))
    sums = [abs(math.fsum(map(float.__mul__, signs, differences))) for signs in flips]
    return sum(s >= whole - 1e-12 for s in sums) / len(sums)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the order given."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def against(ours: dict[int, float], theirs: dict[int, float]) -> dict[str, Any]:
    """Paired comparison over the seeds that both have run."""
    seeds = sorted(set(ours) & set(theirs))
    differences = [ours[seed] - theirs[seed] for seed in seeds]
    if not seeds:
        return {"seeds": 0}
    low, high = bootstrap(differences)
    mean = statistics.fmean(differences)
    return {
        "seeds": len(seeds),
        "difference": mean,
        "low": low,
        "high": high,
        # 2 ** 20 sums would take a minute; those comparisons are by intervals.
        "p": sign_flip(differences) if len(seeds) <= 12 else None,
    }


def verdict(records: Records, tasks: Sequence[str]) -> dict[str, Any]:
    """The winner against its twins (Holm over all of them) and against token PPO without pressure."""
    winner = finalists(records)[0]
    twins, quiet = dict[str, Any](), dict[str, Any]()
    for task in tasks:
        at = levels(records, task)
        for name in LEVELS:
            if movement(records, task, winner, at[name]) is None:  # for want of time
                continue
            rate, _ = twin(records, task, winner, name)
            pair = [
                finals(records, "test", task, arm, (at[name][0], r))
                for arm, r in ((winner, at[name][1]), ("turn", rate))
            ]
            twins[f"{task} {name}"] = {"rate": rate, **against(*pair)}
        for name in QUIET:
            pair = [finals(records, "test", task, arm, at[name]) for arm in (winner, "token")]
            quiet[f"{task} {name}"] = against(*pair)
    complete = {cell: line for cell, line in twins.items() if line["seeds"] == len(TEST_SEEDS)}
    for line, p in zip(
        complete.values(), holm([line["p"] for line in complete.values()]), strict=True
    ):
        line["holm"] = p
    return {"winner": winner, "twins": twins, "token": quiet, "cells": cells(records, tasks)}


def swept(records: Records) -> dict[str, dict[str, Any]]:
    """Of each rival in the sweep: final success by rate, the mean over its logarithm, the best rate."""
    pressure, found = levels(records, "corridor")["threshold"][0], dict[str, dict[str, Any]]()
    for arm in dict.fromkeys(record["key"][2] for record in records.of("sweep", "corridor")):
        ends = {r: finals(records, "sweep", "corridor", arm, (pressure, r)) for r in SWEEP_RATES}
        means = {rate: statistics.fmean(runs.values()) for rate, runs in ends.items() if runs}
        logs = [math.log(rate) for rate in means]
        area = float(np.trapezoid(list(means.values()), logs))
        best = max(means, key=means.__getitem__)
        found[arm] = {
            "finals": means,
            "area": area / (logs[-1] - logs[0]) if len(logs) > 1 else None,
            "best": best,
        }
    return found


def cells(records: Records, tasks: Sequence[str]) -> list[dict[str, Any]]:
    """Final success and collapses of every rival in every cell of the test."""
    alike: dict[tuple[str, ...], list[Record]] = {}
    for record in records.rows:
        cell = record["cell"]
        if cell["stage"] in ("test", "sweep", "groups") and cell["task"] in tasks:
            key = (cell["stage"], cell["task"], record["level"], *record["key"][2:5])
            alike.setdefault(key, []).append(record)
    lines = []
    for (stage, task, level, arm, pressure, rate), rows in sorted(alike.items()):
        judged = [judge(rows_of(row)) for row in rows]
        ends = [run["final"] for run in judged]
        low, high = bootstrap(ends)
        line = {"stage": stage, "task": task, "level": level, "arm": arm, "pressure": pressure}
        line |= {"rate": float(rate), "runs": len(rows), "final": statistics.fmean(ends)}
        line |= {"low": low, "high": high, "worst": min(ends)}
        lines.append({**line, "collapsed": int(sum(run["collapsed"] for run in judged))})
    return lines
