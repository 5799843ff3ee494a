"""From records to a table per task and setting: arms, seeds, paired differences."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from _records import Record

# Rollouts at the end of a run.
LAST = 5
# Student's t at 0.975 for 1, 2, ... degrees of freedom; beyond them the normal quantile is close.
T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
Line = dict[str, Any]


def curve(record: Record, name: str | None = None) -> list[float]:
    """Return a curve of a run, by default the one by which it is judged; 0 after the run has died."""
    values = record["curves"].get(name or record["measure"], [])
    missing = record["rollouts"] - len(values) if record["error"] else 0
    return [*(value or 0.0 for value in values), *[0.0] * missing]


def final(record: Record) -> float:
    """Return the measure on held-out rows after training, or of the last rollouts; 0 for a run that died."""
    if record["error"]:
        return 0.0
    if record["evaluation"]:
        return float(record["evaluation"]["after"])
    return mean(curve(record)[-LAST:]) or 0.0


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of what is there; None of nothing."""
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None


def drop(values: Iterable[float], height: float = 0.0) -> float:
    """Return how far a curve falls below its best value so far, once that is `height` or more."""
    best = largest = 0.0
    for value in values:
        best = max(best, value)
        if best >= height:
            largest = max(largest, best - value)
    return largest


def reached(values: Sequence[float], level: float) -> int | None:
    """Return after how many rollouts the mean of five is at a level; None if it never is."""
    ends = range(LAST, len(values) + 1)
    return next((end for end in ends if sum(values[end - LAST : end]) >= level * LAST), None)


def lines(
    records: Sequence[Record], base: str | None, level: float | None = None, height: float = 0.0
) -> list[Line]:
    """Return a line per study, task, setting and arm.

    Args:
        records: of any studies.
        base: the arm with which others are compared, seed by seed.
        level: counts rollouts until the mean of five is there.
        height: of the best rollout, from which on a drop counts.
    """
    groups: dict[tuple[str, str, str], dict[str, dict[int, Record]]] = {}
    for record in sorted(records, key=lambda record: (record["arm"] != base, record["seed"])):
        where = record["study"], record["task"], record["setting"]
        groups.setdefault(where, {}).setdefault(record["arm"], {})[record["seed"]] = record
    found = []
    for (study, task, setting), arms in sorted(groups.items()):
        for arm, runs in arms.items():
            curves = [curve(run) for run in runs.values()]
            line: Line = {"study": study, "task": task, "setting": setting, "arm": arm}
            line["seeds"] = list(runs)
            line["before"] = mean(run["evaluation"]["before"] for run in runs.values() if run["evaluation"])
            line["finals"] = [final(run) for run in runs.values()]
            line["lasts"] = [mean(values[-LAST:]) for values in curves]
            line["alls"] = list(map(mean, curves))
            line["drops"] = [drop(values, height) for values in curves]
            line["died"] = sum(bool(run["error"]) for run in runs.values())
            if level is not None:
                line["reached"] = [reached(values, level) for values in curves]
            found.append(line)
    for line in found:
        where = line["study"], line["task"], line["setting"]
        others = [o for o in found if (o["study"], o["task"], o["setting"], o["arm"]) == (*where, base)]
        if others and line["arm"] != base:
            for name in ("final", "all"):
                ours, theirs = (
                    dict(zip(each["seeds"], each[f"{name}s"], strict=True)) for each in (line, others[0])
                )
                line[f"{name}_difference"] = difference(ours, theirs)
    return found


def difference(ours: dict[int, float], theirs: dict[int, float]) -> Line | None:
    """Return the mean of paired differences with its t-interval of 95 %; None without a pair.

    Args:
        ours: a figure by seed.
        theirs: likewise.
    """
    pairs = [
        ours[seed] - theirs[seed] for seed in ours if ours[seed] is not None and theirs.get(seed) is not None
    ]
    if not pairs:
        return None
    mean, found = statistics.fmean(pairs), {"pairs": len(pairs), "low": None, "high": None}
    if len(pairs) > 1:
        quantile = T_QUANTILES[len(pairs) - 2] if len(pairs) <= len(T_QUANTILES) + 1 else 1.96
        half = quantile * statistics.stdev(pairs) / len(pairs) ** 0.5
        found |= {"low": mean - half, "high": mean + half}
    return {**found, "mean": mean}


def markdown(found: Sequence[Line], base: str | None) -> str:
    """Return the lines as Markdown tables, one per study, task and setting."""
    texts, before = list[str](), None
    for line in found:
        cells = {
            "arm": f"`{line['arm']}`",
            "seeds": ranges(line["seeds"]),
            "before": number(line["before"]),
            "final": number(mean(line["finals"])),
            "each seed": " ".join(map(number, line["finals"])),
            f"last {LAST}": number(mean(line["lasts"])),
            "all": number(mean(line["alls"])),
            "largest drop": number(max(line["drops"])),
            "died": str(line["died"] or ""),
        }
        if "reached" in line:
            cells["reached after"] = " ".join("-" if n is None else str(n) for n in line["reached"])
        if base:
            cells[f"final less `{base}`"] = paired(line.get("final_difference"))
            cells[f"all less `{base}`"] = paired(line.get("all_difference"))
        where = line["study"], line["task"], line["setting"]
        if where != before:
            texts += ["", f"**{', '.join(where)}**", "", f"| {' | '.join(cells)} |"]
            texts.append("|" + "---|" * len(cells))
            before = where
        texts.append(f"| {' | '.join(cells.values())} |")
    return "\n".join(texts)


def ranges(seeds: Sequence[int]) -> str:
    """Show ascending numbers, several in a row as "700-729"."""
    parts = list[list[int]]()
    for seed in seeds:
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return " ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def number(value: float | None) -> str:
    """Show two decimals."""
    return "" if value is None else f"{value:.2f}"


def paired(found: Line | None) -> str:
    """Show a difference with its interval and its number of pairs."""
    if found is None:
        return ""
    interval = "" if found["low"] is None else f" ({found['low']:+.2f} to {found['high']:+.2f})"
    return f"{found['mean']:+.2f}{interval} [{found['pairs']}]"
