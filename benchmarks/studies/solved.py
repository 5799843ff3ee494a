"""Which trainer keeps a task that it has solved: candidates for a default that does not fall.

    python benchmarks/studies/solved.py --stages candidates      # goes on where it was
    python benchmarks/studies/solved.py --quick                  # under a minute, to see that it runs

The rules, written before the runs that they judge, are in `solved.md`; the candidates are prototypes
(`_solved_trainer.py`). Each finished run is a line of `solved.jsonl.gz`; one that is there is not run again.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).parents[1]))  # for _outcome

from _outcome import finish
from _rivals_stages import CLIP_RANGES, Record, Records, Trial, levels
from _solved_grpo import run_grpo
from _solved_trainer import FIGURES, SolvedTrainer, parts_of, settings_of
from _stability_grid import SUCCESS, Cell
from _stability_pool import run_all
from _stability_run import run
from _stability_tasks import load_task

HERE = Path(__file__).parent
RATE = 4e-3  # the tutorial's
GRPO = "trl-grpo"
TASKS = ("hanoi", "guess", "corridor", "demo", "textworld")
HEIGHT, DROP, NEAR = 0.9, 0.15, 0.05  # of a fall
CANDIDATES = (
    *("share", "share+memory-0.9", "winners+share", "share+undo-0.05", "share+spread-0.9"),
    *("share+beta2-0.99", "share+clip-2", "share+logits+memory-0.9", "winners+share+memory-0.9"),
    *("share+delta-1.5", "share+kl-0.05", "share+memory-0.95", "share+memory-0.8"),
    *("share+least-0.9", "share+beta2-0.95", "share+undo-0.1", "share+kl-0.1"),
)
CONTROLS = (("share", RATE / 2), ("share", RATE / 4))
SEEDS = {"quick": range(1), "candidates": range(600, 604), "others": range(500, 503)}
SEEDS |= {"test": range(700, 730)}


def trial(
    stage: str, task: str, arm: str, pressure: str, rate: float, seed: int, cliprange: float = 0.1
) -> Trial:
    """A run of an arm."""
    cell = Cell(stage, task, "turn-ppo", pressure, rate, seed, power=4.0, cliprange=cliprange)
    return Trial(arm, pressure, cell)


def of_game(stage: str, game: str, arm: str, seed: int, rate: float = RATE) -> Trial:
    """A run of hanoi or of the guessing game, on the agent that the seed chooses."""
    return trial(stage, f"{game}-{seed % 3}", arm, "tutorial", rate, seed)


def candidates(records: Records) -> list[Trial]:
    """All arms on hanoi at the tutorial's rate."""
    arms = [*((arm, RATE) for arm in CANDIDATES), *CONTROLS]
    pairs = itertools.product(SEEDS["candidates"], arms)
    return [of_game("candidates", "hanoi", arm, seed, rate) for seed, (arm, rate) in pairs]


def on_others(stage: str, arms: list[str], seeds: range, names: tuple[str, ...]) -> Iterator[Trial]:
    """Runs on the tasks of the study of rivals, at its levels."""
    rivals = Records(HERE / "rivals.jsonl.gz")
    cells = [("corridor", name) for name in names]
    cells += [(task, "threshold") for task in ("demo", "textworld")]
    for seed, (task, name), arm in itertools.product(seeds, cells, arms):
        width = CLIP_RANGES[task]
        yield replace(trial(stage, task, arm, *levels(rivals, task)[name], seed, width), level=name)


def others(records: Records) -> list[Trial]:
    """The best three and the references on the other tasks."""
    arms = [*best(records)[:3], "share", "winners+share"]
    guess = itertools.product(range(610, 613), arms)
    names = ("threshold", "extreme", "none")
    jobs = [of_game("others", "guess", arm, seed) for seed, arm in guess]
    return [*jobs, *on_others("others", arms, SEEDS["others"], names)]


def test(records: Records, finalist: str) -> list[Trial]:
    """The finalist against the references on fresh seeds."""
    arms = [finalist, "share", "winners+share"]
    hanoi = itertools.product(SEEDS["test"], arms)
    jobs = [of_game("test", "hanoi", arm, seed) for seed, arm in hanoi]
    few = SEEDS["test"][:10]
    jobs += [of_game("test", "guess", arm, seed) for seed, arm in itertools.product(few, arms)]
    jobs += on_others("test", arms, few, ("threshold",))
    slow = itertools.product(few, (1e-3, 2e-3), arms)
    return [*jobs, *(of_game("test", "hanoi", arm, seed, rate) for seed, rate, arm in slow)]


def grpo(records: Records) -> list[Trial]:
    """TRL's own GRPO where token PPO collapses; the others have run there on these seeds."""
    rivals, jobs = Records(HERE / "rivals.jsonl.gz"), list[Trial]()
    for task, seeds in (("corridor", range(400, 410)), ("textworld", range(400, 405))):
        level = levels(rivals, task)["threshold"]
        jobs += [trial("grpo", task, GRPO, *level, seed, 0.2) for seed in seeds]
    return jobs


def work(job: Trial, folder: str, updates: int | None) -> list[dict[str, Any]]:
    """One run, in a process that stays for others."""
    task = load_task(job.cell.task, Path(folder))
    if updates is not None:
        task = replace(task, updates=updates, test=task.test.select(range(8)))
    started = time.process_time()
    if job.arm == GRPO:
        rows = run_grpo(job.cell, task)
        return [*rows[:-1], {**rows[-1], "cpu": time.process_time() - started}]
    settings = settings_of(job.arm)
    if job.cell.pressure != "tutorial":
        settings["lr_scheduler_type"] = "constant"
    rows = run(job.cell, task, partial(SolvedTrainer, arm=job.arm), FIGURES, **settings)
    rows[-1]["cpu"] = time.process_time() - started
    return rows


class Runs(Records):
    """Records whose lines carry the commit of the code."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, FIGURES)
        self.about = {"commit": _commit()}


def _commit() -> str:
    """The commit that is checked out, with a plus sign if files differ from it."""
    words = ["git", "-C", str(HERE), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


# --------------------------------------------------------------------------------- verdict


def fall(curve: list[float]) -> dict[str, Any]:
    """Depth of the largest fall of a curve, and rollouts from the first until it is undone."""
    top, depth, fell, recovery = 0.0, 0.0, None, None
    for update, success in enumerate(curve):
        if top >= HEIGHT and top - success >= DROP:
            depth = max(depth, top - success)
            fell = (update, top) if fell is None else fell
        if fell is not None and recovery is None and success >= fell[1] - NEAR:
            recovery = update - fell[0]
        top = max(top, success)
    return {"fell": fell is not None, "depth": round(depth, 3), "recovery": recovery}


def judged(record: Record) -> dict[str, Any]:
    """One run's figures."""
    curve = [x for x in record["curves"][SUCCESS] if x is not None]
    final = 0.0 if record["error"] else record["test"][-1]
    late = statistics.fmean(curve[-10:]) if curve else 0.0
    return {**fall(curve), "final": final, "late": late, "collapsed": final < 0.5 * max(curve)}


def summary(records: Records, stage: str) -> list[dict[str, Any]]:
    """A line per arm, task and rate: falls, depth, final success."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for record in records.rows:
        cell = record["cell"]
        if cell["stage"] == stage:
            key = (cell["task"].split("-")[0], record["level"], record["key"][2], record["key"][4])
            groups.setdefault(key, []).append(judged(record))
    lines = []
    for (task, level, arm, rate), runs in groups.items():
        line = {"task": task, "level": level, "arm": arm, "rate": float(rate), "runs": len(runs)}
        line |= {name: sum(r[name] for r in runs) for name in ("fell", "collapsed")}
        line["depth"] = max(run["depth"] for run in runs)
        line |= {
            name: round(statistics.fmean(r[name] for r in runs), 3) for name in ("late", "final")
        }
        lines.append(line)
    return sorted(lines, key=lambda line: (line["task"], line["level"], *_rank(line)))


def _rank(line: dict[str, Any]) -> tuple[float, ...]:
    return line["fell"] / line["runs"], line["depth"], -line["late"]


def best(records: Records) -> list[str]:
    """Candidates by rank, one of those that differ in a number alone."""
    chosen: dict[frozenset[str], str] = {}
    for line in summary(records, "candidates"):
        references = ("share", "winners+share")
        if line["arm"] not in references and line["runs"] == len(SEEDS["candidates"]):
            chosen.setdefault(frozenset(parts_of(line["arm"])), line["arm"])
    return list(chosen.values())


def main() -> None:
    """Run the stages, then print the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    stages = ("candidates", "others", "test", "grpo")
    parser.add_argument("--stages", nargs="+", choices=stages, default=["candidates"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--finalist", help="of the test; default: the best candidate")
    parser.add_argument("--budget_hours", type=float, default=24.0, help="no run starts after it")
    parser.add_argument("--jobs", dest="workers", type=int, default=1, help="runs at the same time")
    parser.add_argument("--output", type=Path, default=Path("runs/solved"), help="of agents")
    parser.add_argument("--data", type=Path, default=HERE / "solved.jsonl.gz")
    parser.add_argument("--quick", action="store_true", help="two runs of two updates")
    args = parser.parse_args()
    args.updates = 2 if args.quick else None
    if args.quick:
        args.output = args.output / "quick"
        args.data, args.stages = args.output / "solved.jsonl.gz", []
        shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True, exist_ok=True)
    records, deadline = Runs(args.data), time.monotonic() + 3600 * args.budget_hours
    left_out = dict[str, int]()
    jobs = {"candidates": candidates, "others": others, "grpo": grpo}
    jobs["test"] = lambda records: test(records, args.finalist or best(records)[0])
    for stage in args.stages:
        wanted = [job for job in jobs[stage](records) if job.task.split("-")[0] in args.tasks]
        left_out[stage] = run_all(wanted, records, args, deadline, work)
    if args.quick:
        arms = ("share+memory-0.9", "share+undo-0.05+clip-2")
        quick = [of_game("quick", "hanoi", arm, 0) for arm in (*arms, GRPO)]
        left_out["quick"] = run_all(quick, records, args, deadline, work)
    died = [{"error": row["error"]} for row in records.rows if args.quick and row["error"]]
    found = {stage: summary(records, stage) for stage in stages}
    finish({"quick": args.quick, "left_out": left_out, **found, "died": died})


if __name__ == "__main__":
    main()
