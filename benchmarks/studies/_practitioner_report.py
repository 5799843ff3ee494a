"""From the runs of the practitioner's study to its claims, its table and its picture."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from _rivals_stages import Record, Records, rows_of
from _rivals_test import against
from _stability_report import bootstrap, judge
from rich.console import Console
from rich.table import Table as Grid

PILOT_SEED = "100"
NEAR = -0.05  # how much worse an easy world's agent may be and still be called no worse
BySeed = dict[int, float]


class Runs:
    """Figures by seed of the runs of a kind.

    Args:
        records: of the study.
    """

    def __init__(self, records: Records) -> None:
        self._runs: dict[tuple[str, ...], dict[int, Record]] = {}
        for record in records.rows:
            world, reward, method, demonstrations, _, seed = record["key"]
            if seed != PILOT_SEED:
                kind = (world, reward, method, demonstrations)
                self._runs.setdefault(kind, {})[int(seed)] = record

    def figures(
        self,
        of: Callable[[Record], float],
        world: str = "easy",
        reward: str = "sparse",
        method: str = "ppo",
        demonstrations: int = 0,
    ) -> BySeed:
        """A figure of each seed's run; nothing where none has been run."""
        runs = self._runs.get((world, reward, method, str(demonstrations)), {})
        return {seed: of(record) for seed, record in runs.items()}

    def visits(self, when: int, world: str = "easy") -> BySeed:
        """Success of ppo in the other world, before training (1) or after (2), where it was there."""
        runs = self._runs.get((world, "sparse", "ppo", "0"), {})
        return {
            seed: float(record["test"][when])
            for seed, record in runs.items()
            if len(record["test"]) == 4
        }

    @property
    def kinds(self) -> list[tuple[str, ...]]:
        """World, reward, method and demonstrations of what has been run."""
        return sorted(self._runs)


def start(record: Record) -> float:
    """Success before training."""
    return float(record["test"][0])


def final(record: Record) -> float:
    """Success after training, 0 for a run that could not go on."""
    return judge(rows_of(record))["final"]


def speed(record: Record) -> float:
    """Mean success of the rollouts of all updates."""
    return judge(rows_of(record))["area"]


def minus(ours: BySeed, theirs: BySeed) -> BySeed:
    """Seed by seed, where both are there."""
    return {seed: ours[seed] - theirs[seed] for seed in sorted({*ours} & {*theirs})}


def claim(text: str, differences: BySeed, bar: float = 0.0) -> dict[str, Any]:
    """What the runs say of a claim, by the rules."""
    line = {"claim": text, **against(differences, dict.fromkeys(differences, 0.0))}
    if line["seeds"] < 2:
        return {**line, "verdict": "not run"}
    verdict = "agrees" if line["low"] > bar else "disagrees" if line["high"] < bar else "open"
    return {**line, "verdict": verdict}


def claims(runs: Runs) -> list[dict[str, Any]]:
    """All of them, in the order of the rules."""
    lines, gains = [], {}
    for name, of in (("faster", speed), ("better in the end", final)):
        for method in ("ppo", "grpo", "rloo", "st-ppo", "rebn"):
            dense, sparse = (
                runs.figures(of, reward=reward, method=method) for reward in ("dense", "sparse")
            )
            gains[method] = minus(dense, sparse)
            text = f"dense rewards are {name} with {method}"
            # The guide speaks of the first three; of the others the runs are there anyway.
            lines.append({**claim(text, gains[method]), "guide": method in ("ppo", "grpo")})
    biased = {
        seed: (gains["ppo"][seed] + gains["grpo"][seed]) / 2
        for seed in {*gains["ppo"]} & {*gains["grpo"]}
    }
    text = "ppo and grpo gain more by dense rewards than rloo"
    lines.append(claim(text, minus(biased, gains["rloo"])))

    before, from_easy, from_hard = runs.visits(1), runs.visits(2), runs.figures(final, "hard")
    lines.append(
        claim("training on the easy world helps on the hard one", minus(from_easy, before))
    )
    text = "training on the easy world does no worse on the hard one than training there"
    lines.append(claim(text, minus(from_easy, from_hard), NEAR))
    for inner in (16, 32, 48):
        for name, end in (("reinforcement", 0), ("demonstrations", 64)):
            mixed, alone = (runs.figures(final, demonstrations=n) for n in (inner, end))
            text = f"{inner} demonstrations, then reinforcement, do better than {name} alone"
            lines.append(claim(text, minus(mixed, alone)))
    return [{"guide": True, **line} for line in lines]


def spread(name: str, figures: BySeed) -> dict[str, float]:
    """Mean and interval."""
    values = list(figures.values())
    low, high = bootstrap(values)
    return {name: statistics.fmean(values), f"{name}_low": low, f"{name}_high": high}


def report(records: Records) -> dict[str, Any]:
    """Means and intervals of every kind of run, and the claims."""
    runs, table = Runs(records), []
    for world, reward, method, demonstrations in runs.kinds:
        which = (world, reward, method, int(demonstrations))
        ends = runs.figures(final, *which)
        line: dict[str, Any] = {"world": world, "reward": reward, "method": method}
        line |= {"demonstrations": int(demonstrations), "seeds": len(ends)}
        line |= spread("final", ends)
        for name, of in (("start", start), ("speed", speed)):
            line[name] = statistics.fmean(runs.figures(of, *which).values())
        after = runs.visits(2, world)
        if after and (reward, method, demonstrations) == ("sparse", "ppo", "0"):
            line |= spread("visit", after)
            line["visit_before"] = statistics.fmean(runs.visits(1, world).values())
        table.append(line)
    return {"table": table, "claims": claims(runs)}


def print_table(outcome: dict[str, Any]) -> None:
    """Both parts of the report."""
    console, grid = Console(width=120), Grid(title="success on held-out games")
    columns = ("world", "reward", "method", "demonstrations", "seeds", "start", "speed", "final")
    for name in (*columns, "90 %", "other world"):
        grid.add_column(name)
    for line in outcome["table"]:
        cells = [f"{v:.3f}" if isinstance(v, float) else str(v) for v in (line[n] for n in columns)]
        other = f"{line['visit']:.3f}" if "visit" in line else ""
        grid.add_row(*cells, f"{line['final_low']:.3f} - {line['final_high']:.3f}", other)
    console.print(grid)
    grid = Grid(title="claims")
    for name in ("claim", "seeds", "difference", "90 %", "verdict"):
        grid.add_column(name)
    for line in outcome["claims"]:
        if line["seeds"]:
            interval = f"{line['low']:+.3f} to {line['high']:+.3f}"
            cells = [str(line["seeds"]), f"{line['difference']:+.3f}", interval, line["verdict"]]
            grid.add_row(line["claim"], *cells)
    console.print(grid)
