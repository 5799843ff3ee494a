"""Which credit teaches an agent to write notes: a code is read once and asked for eight contexts later.

    python benchmarks/studies/relay.py --stages tune relay      # goes on where it was
    python benchmarks/studies/relay.py --quick                  # under a minute, to see that it runs

Rules and expectations, written before the runs that they judge, are in `relay.md`; task and arms are in
`_relay_task.py`. Each finished run is a line of `relay.jsonl.gz`; one that is there is not run again. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.append(str(Path(__file__).parents[1]))  # for _outcome

import torch
import transformers
from _outcome import finish
from _relay_task import EPISODES, FIGURES, LEVEL, WARM_UP, WINDOW, build_agent, train
from _rivals_stages import Records

HERE = Path(__file__).parent
ARMS = {  # `-ppo`: with ratios of tokens, as advantages are; the others' are of turns
    "turn": "turn GAE over contexts",
    "grpo": "the group's comparison for every turn",
    "rloo": "the same, by leaving one out",
    "each-ppo": "every context ends with the reward of the episode",
    "factor-ppo": "the same, times (gamma lambda)^(tokens after it)",
    "token-ppo": "token GAE on the joined view",
}
# 30 tokens are sampled in an episode of relay, 48 in one of facts.
FIXED = {"each": 1.0, "factor": 0.978, "grpo": 0.0, "rloo": 0.0}
TUNED = {
    "turn": (0.5, 0.7, 0.95),
    "token": (0.79, 0.89, 0.98),
}  # those of a turn, per token of three
SEEDS = {"tune": (50, 51), "relay": range(5), "facts": range(3), "swaps": range(3)}
SWAPS = 0.33  # of the mistakes of the stage swaps
FIRST_CAP, PATIENCE = 48, 4  # rollouts of tuning and of our arm; the others' over its median


@dataclass(frozen=True)
class Run:
    """One training."""

    stage: str
    arm: str
    lam: float
    seed: int
    cap: int  # rollouts after which it is censored

    @property
    def task(self) -> str:
        """The agent that is trained."""
        return "facts" if self.stage == "facts" else "relay"

    @property
    def key(self) -> tuple[str, ...]:
        """Identity of the run among the records."""
        return self.stage, self.arm, str(self.lam), str(self.seed)


class Runs(Records):
    """The recorded runs."""

    def keep(self, run: Run, found: dict[str, Any]) -> None:
        """Append a run."""
        words = ["git", "-C", str(HERE), "describe", "--always", "--dirty=+", "--exclude=*"]
        commit = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
        record = {"key": list(run.key), "commit": commit, **asdict(run), **found}
        self.rows.append(record)
        with open(self.path, "ab") as file:
            file.write(gzip.compress(json.dumps(record).encode() + b"\n", mtime=0))


# ---------------------------------------------------------------------------------- stages


def best(records: Runs, arm: str) -> float:
    """The lambda whose runs of tuning needed the fewest episodes; of equals the best on average."""
    arm = arm.removesuffix("-ppo")
    if arm in FIXED:
        return FIXED[arm]
    ranks = {}
    for lam in TUNED[arm]:
        keys = [Run("tune", arm, lam, seed, 0).key for seed in SEEDS["tune"]]
        rows = [row for row in records.rows if tuple(row["key"]) in keys]
        if len(rows) < len(keys):
            raise SystemExit(f"{arm}: not all runs of the stage tune are there.")
        needed = sum(min(episodes(row), FIRST_CAP * EPISODES) for row in rows)
        ranks[lam] = needed, -sum(statistics.fmean(row["curves"][FIGURES[0]]) for row in rows)
    return min(ranks, key=ranks.__getitem__)


def jobs(records: Runs, stage: str) -> list[Run]:
    """The runs of a stage that can start: our arm's first, as they set the others' cap."""
    if stage == "tune":
        every = itertools.product(SEEDS["tune"], TUNED)
        return [Run(stage, a, lam, seed, FIRST_CAP) for seed, a in every for lam in TUNED[a]]
    ours = [Run(stage, "turn", best(records, "turn"), seed, FIRST_CAP) for seed in SEEDS[stage]]
    if any(run.key not in records.keys for run in ours):
        return ours
    keys = {run.key for run in ours}
    needed = [episodes(row) for row in records.rows if tuple(row["key"]) in keys]
    cap = math.ceil(PATIENCE * min(statistics.median(needed), FIRST_CAP * EPISODES) / EPISODES)
    others = itertools.product(SEEDS[stage], list(ARMS)[1:])
    return [*ours, *(Run(stage, arm, best(records, arm), seed, cap) for seed, arm in others)]


def taught(run: Run, folder: str, quick: bool) -> Path:
    """The agent with which a run begins; each seed has its own, all arms of a seed the same."""
    swaps = SWAPS if run.stage == "swaps" else 0.0
    return build_agent(Path(folder), run.seed, swaps, 20 if quick else 500)


def work(run: Run, folder: str, quick: bool) -> dict[str, Any]:
    """One run, in a process that stays for others."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    agent = taught(run, folder, quick)
    started, sizes = time.process_time(), {"episodes": 16} if quick else {}
    try:
        curves, error = train(agent, run.task, run.arm, run.lam, run.seed, run.cap, **sizes), None
    except Exception as died:  # a run that dies is a result, too
        curves, error = {name: [] for name in FIGURES}, repr(died)[:200]
    return {"curves": curves, "error": error, "cpu": round(time.process_time() - started, 1)}


def run_all(stage: str, records: Runs, args: argparse.Namespace, deadline: float) -> int:
    """Run what is not there yet; returns how many runs the deadline left out."""
    pool = ProcessPoolExecutor(args.workers, mp_context=multiprocessing.get_context("spawn"))
    running = dict[Future[Any], Run]()
    with pool:
        while True:
            wanted = quick_jobs() if args.quick else jobs(records, stage)
            wanted = [run for run in wanted if run.key not in records.keys]
            todo = [run for run in wanted if run not in running.values()]
            while todo and len(running) < args.workers and time.monotonic() < deadline:
                run = todo.pop(0)
                taught(run, str(args.output), args.quick)  # here, so that no two runs do it
                running[pool.submit(work, run, str(args.output), args.quick)] = run
            if not running:
                return len(wanted)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run = running.pop(future)
                records.keep(run, found := future.result())
                print(*run.key, reached(found), found["error"] or "", flush=True)


def quick_jobs() -> list[Run]:
    """Two rollouts of each arm."""
    lams = {**FIXED, **{arm: lams[1] for arm, lams in TUNED.items()}}
    runs = [Run("relay", arm, lams[arm.removesuffix("-ppo")], 0, 2) for arm in ARMS]
    return [*runs, Run("facts", "turn", 0.7, 0, WARM_UP + 1)]


# --------------------------------------------------------------------------------- verdict


def reached(row: dict[str, Any]) -> int | None:
    """The rollout with which the mean of the last WINDOW reaches LEVEL; None if none does."""
    curve = row["curves"][FIGURES[0]]
    ends = range(WINDOW, len(curve) + 1)
    return next((n for n in ends if statistics.fmean(curve[n - WINDOW : n]) >= LEVEL), None)


def episodes(row: dict[str, Any]) -> float:
    """Episodes until then; infinite for a run that is censored."""
    return math.inf if (count := reached(row)) is None else float(count * EPISODES)


def summary(records: Runs, stage: str) -> list[dict[str, Any]]:
    """A line per arm: how many runs reach the level, and with how many episodes."""
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for row in records.rows:
        if row["stage"] == stage:
            groups.setdefault((row["arm"], row["lam"]), []).append(row)
    lines = []
    for (arm, lam), rows in groups.items():
        needed = sorted(map(episodes, rows))
        shown = [count if count < math.inf else None for count in needed]
        curves = [row["curves"] for row in rows]
        final = [
            statistics.fmean([0.0, *curve[FIGURES[0]][-WINDOW:]][-WINDOW:]) for curve in curves
        ]
        tokens = [EPISODES * sum(curve["completions/mean_length"]) for curve in curves]
        seen = [x for curve in curves for x in curve["study/explained"][WARM_UP:]]
        line = {"arm": arm, "lam": lam, "runs": len(rows), "reached": len(rows) - shown.count(None)}
        line |= {"episodes": shown, "cap": max(row["cap"] for row in rows) * EPISODES}
        line |= {"median": shown[len(shown) // 2], "final": round(statistics.fmean(final), 3)}
        line |= {"tokens": round(statistics.fmean(tokens)), "cpu": sum(row["cpu"] for row in rows)}
        if seen and arm not in ("grpo", "rloo"):
            line["explained"] = round(statistics.median(seen), 3)
        lines.append(line)
    return lines


def main() -> None:
    """Run the stages, then print the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", nargs="+", choices=list(SEEDS), default=list(SEEDS))
    parser.add_argument("--budget_hours", type=float, default=24.0, help="no run starts after it")
    parser.add_argument("--jobs", dest="workers", type=int, default=1, help="runs at the same time")
    parser.add_argument("--output", type=Path, default=Path("runs/relay"), help="of agents")
    parser.add_argument("--data", type=Path, default=HERE / "relay.jsonl.gz")
    parser.add_argument("--quick", action="store_true", help="two rollouts of each arm")
    args = parser.parse_args()
    if args.quick:
        args.output = args.output / "quick"
        args.data, args.stages = args.output / "relay.jsonl.gz", ["relay"]
        shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True, exist_ok=True)
    records, deadline = Runs(args.data), time.monotonic() + 3600 * args.budget_hours
    left_out = {stage: run_all(stage, records, args, deadline) for stage in args.stages}
    found = {stage: summary(records, stage) for stage in SEEDS}
    died = [{"error": row["error"]} for row in records.rows if row["error"]]
    finish({"quick": args.quick, "left_out": left_out, **found, "died": died})


if __name__ == "__main__":
    main()
