"""What "A Practitioner's Guide to Multi-turn Agentic RL" asks, on games for a small agent.

    pip install 'textworld>=1.7'
    python benchmarks/studies/practitioner.py                    # goes on where it was
    python benchmarks/studies/practitioner.py --budget_hours 0   # games, rows and agent alone
    python benchmarks/studies/practitioner.py --quick            # under a minute, to see that it runs

The guide is arXiv:2510.01132. Its rules here, written before the first run:

Runs. Games, agent (0.43M parameters, taught on walkthroughs with mistakes) and settings are those of
`_textworld_task.py` without off-policy pressure: 20 updates of 32 episodes, one epoch of four
mini-batches, AdamW at a constant rate, no KL. The rate is 3e-4 for every method: it was the best of three
for token PPO on seeds 100 and 101 (docs/experiments.md), and no other method has been tuned. Groups are
of four episodes; ReBN plays every prompt once, PPO too. Where the guide differs: models of 1.5B and
more, 256 episodes a batch, one mini-batch, KL in the reward, games of words from a house.
Seeds 500-504. A figure is the success on 128 held-out games of the same kind, sampled at temperature 1.
Intervals are of 90 %, over seeds; differences are paired by seed. A claim *agrees* where the interval
lies on its side of zero, *disagrees* where it lies on the other, and is *open* otherwise, whatever the mean;
claims are not corrected for their number. Two seeds of every question come first, then the others, in
the order of the list below, all of a seed before the next; what the time leaves out is left out from the
end. (At first: all five seeds of a question before the next. Changed for the time of the machine, before
the first run that counts; three runs of seed 500 had ended in a mix-up of processes and were thrown away.
After two seeds of question 1 question 3 went before what is left of 2, whose games were not made yet.)

1. `rewards`: sparse (1 for having won) and dense (shares of the score as it grows), each by ppo, grpo,
   rloo, st-ppo and rebn. Claims: dense rewards learn faster with ppo and with grpo (mean success of the
   rollouts of all updates); they end better with ppo and with grpo; ppo and grpo gain more
   by them, at the end, than rloo does (the mean of two differences minus the third).
2. `worlds`: ppo with sparse rewards, trained on the easy world (w3-o4-q4, runs of question 1) or on a
   harder one (w6-o8-q4), both played in the end. Claims: whoever trained on the easy
   world does better on the hard one than before training; and not worse than whoever trained there
   ("agrees" if the interval of easy minus hard lies above -0.05, "disagrees" if it lies below).
   (The hard world was w4-o6-q6, where the taught agent wins none of 32 games, and two trained ones 0.00 and
   0.02: it has only seen lists of four steps. So rooms and objects grow and the quest does not;
   w6-o8-q4 was chosen by the taught agent's 4 of 32, before any run ended there. Of the runs of question 1
   the two that belong here were repeated, to be played there before training, too.)
3. `budget`: 640 episodes' worth of training for ppo with sparse rewards, a demonstration counting as ten
   episodes: 64, 48, 32, 16 or 0 demonstrations (walkthroughs of other games, without mistakes, ten
   passes), then 0, 5, 10, 15 or 20 updates; the agent that has been taught before is what a pretrained
   model is elsewhere. The rate of these passes is the best of 3e-4, 1e-3 and 3e-3 with 64 demonstrations
   on seed 100.
   Claim: some mixture ends better than demonstrations alone and better than reinforcement alone.

Each finished run is a line of `practitioner.jsonl.gz`; one that is there is not run again. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).parents[1]))  # for _outcome

import _textworld_task as games
from _outcome import finish
from _practitioner_report import print_table, report
from _rivals_stages import Records
from _stability_grid import SUCCESS, Cell
from _stability_run import run
from _task import Task, warm_start
from adventures import GameKind, demonstration, write_rows
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2ForCausalLM

from trl_stppo import STGRPOTrainer, STPPOTrainer
from trl_stppo.envs.adapters import TextWorldEnv

WORLDS = {
    "easy": games.KIND,
    "hard": GameKind(rooms=6, objects=8, quest_length=4, step_points=True, theme="basic"),
}
REWARDS = ("sparse", "dense")
METHODS: dict[
    str, dict[str, Any]
] = {  # what the driver of the stability study does not know by name
    "ppo": {},
    "grpo": {},
    "rloo": {"variant": "rloo"},
    "st-ppo": {},
    "rebn": {"variant": "rebn", "num_generations": 1},
}
SEEDS, PILOT_SEED = (range(500, 502), range(502, 505)), 100
RATE, SFT_RATES = 3e-4, (3e-4, 1e-3, 3e-3)
BUDGET, PRICE, UPDATE = 640, 10, 32  # all in episodes: in total, of a demonstration, of an update
DEMONSTRATIONS = (16, 32, 48, 64)
LESSON_SEEDS, PASSES = range(528, 628), 10
ROOM = {"max_completion_length": 480}  # the large world has more to say


@dataclass(frozen=True)
class Play:
    """One run."""

    world: str = "easy"
    reward: str = "sparse"
    method: str = "ppo"
    seed: int = 0
    demonstrations: int = 0
    sft_rate: float = 0.0
    base: float = 1.0

    @property
    def key(self) -> tuple[str, ...]:
        """Identity of the run among the records."""
        return (
            *(self.world, self.reward, self.method),
            *map(str, (self.demonstrations, self.sft_rate, self.seed)),
        )

    @property
    def level(self) -> str:
        """For the records: how hard the world is."""
        return self.world

    @property
    def cell(self) -> Cell:
        """For the driver of the stability study."""
        method = self.method if "ppo" in self.method else "grpo"
        cell = Cell("guide", "textworld", method, "none", RATE, self.seed)
        return replace(cell, mode="share", power=4.0) if method == "st-ppo" else cell

    @property
    def updates(self) -> int:
        """What the demonstrations leave of the budget."""
        return (BUDGET - PRICE * self.demonstrations) // UPDATE

    @property
    def visits(self) -> str | None:
        """The other world, where the run belongs to the comparison of worlds."""
        if (self.reward, self.method, self.demonstrations) != ("sparse", "ppo", 0):
            return None
        return "hard" if self.world == "easy" else "easy"


def work(play: Play, folder: Path, updates: int | None = None) -> list[dict[str, Any]]:
    """One run; of a second world both successes stand between those of the world it trains on."""
    task = games.textworld_task(folder, play.reward, WORLDS[play.world])
    task = replace(task, updates=max(1, updates or play.updates))
    trainers, visits = list[Any](), list[dict[str, Any]]()

    def visit() -> None:
        if play.visits:
            there = games.rows_of(folder, games.TEST_SEEDS, WORLDS[play.visits])
            figures = trainers[0].evaluate(eval_dataset=Dataset.from_list(there))
            visits.append({"phase": "test", "update": 0, SUCCESS: figures[f"eval_{SUCCESS}"]})

    def make(**arguments: Any) -> Any:
        trainer = (STPPOTrainer if "ppo" in play.method else STGRPOTrainer)(**arguments)
        if not play.updates:
            trainer.train = lambda: None  # demonstrations alone
        trainers.append(trainer)
        visit()
        return trainer

    started = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        if play.demonstrations:
            task = replace(task, agent=teach(play, task, folder, Path(scratch)))
        rows = run(play.cell, task, make, **ROOM, **METHODS[play.method])
        visit()
        rows[-1:-1] = visits
    rows[-1]["cpu"] = time.process_time() - started
    return rows


def teach(play: Play, task: Task, folder: Path, scratch: Path) -> Path:
    """The agent after some demonstrations."""
    dice = random.Random(play.seed)
    rows = dice.sample(games.rows_of(folder, LESSON_SEEDS), play.demonstrations)
    env = TextWorldEnv()
    shown = [
        demonstration(row, env, games.with_mistakes(row["walkthrough"], 0.0, dice)) for row in rows
    ]
    env.close()
    lessons = [lesson for _ in range(PASSES) for lesson in dice.sample(shown, len(shown))]
    model = Qwen2ForCausalLM.from_pretrained(task.agent)
    tokenizer = AutoTokenizer.from_pretrained(task.agent)
    warm_start(scratch / "taught", model, tokenizer, lessons, play.sft_rate, warmup_steps=0)
    return scratch / "taught"


# ------------------------------------------------------------------------------ questions


def rewards(_: Records, seeds: Iterable[int]) -> list[Play]:
    """Two rewards, five methods."""
    return [
        Play("easy", reward, method, seed)
        for seed in seeds
        for method in METHODS
        for reward in REWARDS
    ]


def worlds(_: Records, seeds: Iterable[int]) -> list[Play]:
    """Whoever trains on the hard world; the others are those of `rewards`."""
    return [Play(world, seed=seed) for seed in seeds for world in WORLDS]


def pilot(*_: Any) -> list[Play]:
    """Rates for demonstrations."""
    return [Play(seed=PILOT_SEED, demonstrations=64, sft_rate=rate) for rate in SFT_RATES]


def budget(records: Records, seeds: Iterable[int]) -> list[Play]:
    """More and more demonstrations, at the pilot's best rate."""
    tried = {r["key"][4]: r["test"][-1] for r in records.rows if r["key"][-1] == str(PILOT_SEED)}
    if len(tried) < len(SFT_RATES):
        return []
    rate = float(max(tried, key=lambda name: tried[name]))
    return [
        play
        for seed in seeds
        for play in (
            Play(seed=seed),
            *(Play(seed=seed, demonstrations=n, sft_rate=rate) for n in DEMONSTRATIONS),
        )
    ]


def quick(*_: Any) -> list[Play]:
    """Each way through the code once."""
    return [
        Play(),
        Play(reward="dense", method="rebn"),
        Play(demonstrations=4, sft_rate=1e-3, method="st-ppo"),
    ]


QUESTIONS: dict[str, Callable[[Records, Iterable[int]], list[Play]]] = {
    question.__name__: question for question in (rewards, worlds, pilot, budget)
}


def run_all(jobs: list[Play], records: Records, args: argparse.Namespace, deadline: float) -> int:
    """Run what is not there yet; returns how many runs the deadline left out."""
    todo = [play for play in jobs if play.key not in records.keys]
    for done, play in enumerate(todo):
        if time.monotonic() > deadline:
            return len(todo) - done
        rows = work(play, args.output, args.updates)
        records.add(play, rows)
        tests = [round(row[SUCCESS], 3) for row in rows if row["phase"] == "test"]
        print(f"{done + 1}/{len(todo)} {' '.join(play.key)} {tests}", flush=True)
    return 0


def main() -> None:
    """Run the questions, print the table, then the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(QUESTIONS)
    parser.add_argument("--questions", nargs="+", choices=names, default=names)
    parser.add_argument("--budget_hours", type=float, default=24.0, help="no run starts after it")
    parser.add_argument("--output", type=Path, default=Path("runs/practitioner"), help="of games")
    data = Path(__file__).with_suffix(".jsonl.gz")
    parser.add_argument("--data", type=Path, default=data)
    parser.add_argument("--figure", type=Path, help="draw what is there into this file")
    parser.add_argument("--quick", action="store_true", help="a few runs of one update")
    args = parser.parse_args()
    if args.quick and find_spec("textworld") is None:  # one of many that are tried in turn
        finish({"quick": True, "skipped": "textworld is not installed"})
        return
    args.updates, questions = None, {name: QUESTIONS[name] for name in args.questions}
    if args.quick:
        args.updates, questions, args.output = 1, {"quick": quick}, args.output / "quick"
        args.data = args.output / "practitioner.jsonl.gz"
        # Half a second a game.
        games.TRAIN_SEEDS, games.TEST_SEEDS = range(32), range(400, 404)
        globals()["LESSON_SEEDS"] = range(4)
        shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True, exist_ok=True)
    games.build_textworld_agent(args.output, **({"steps": 2} if args.quick else {}))
    for split, seeds in (("train", games.TRAIN_SEEDS), ("test", games.TEST_SEEDS)):
        # For scripts/textworld/tiny.yaml.
        write_rows(args.output / "rows" / f"{split}.jsonl", games.rows_of(args.output, seeds))
    records, left_out = Records(args.data), dict[str, int]()
    deadline = time.monotonic() + 3600 * args.budget_hours
    for seeds, (name, question) in itertools.product(SEEDS, questions.items()):
        left_out[f"{name} {seeds[0]}"] = run_all(question(records, seeds), records, args, deadline)
    outcome = report(records)
    print_table(outcome)
    if args.figure:
        from _practitioner_figure import draw  # matplotlib is not for everybody

        draw(outcome["table"], records.rows, args.figure)
    died = [{"error": record["error"]} for record in records.rows if args.quick and record["error"]]
    finish(
        {"quick": args.quick, "left_out": left_out, "runs": len(records.rows), "died": died}
        | outcome
    )


if __name__ == "__main__":
    main()
