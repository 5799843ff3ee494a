"""What drawing several turns and playing the best is worth on the demo, and what it costs.

Two agents play the demo's held-out questions: the one that it begins with and the one that it ends with. The
verifier of both is the critic of the latter's run.

    make demo && python benchmarks/candidates.py --agent runs/demo    # five minutes on one core
    python benchmarks/candidates.py --quick                           # a short training, 24 questions

The last line is JSON.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from _outcome import finish

from trl_stppo import Agent
from trl_stppo.recipes.search import StdlibSearchEnv
from trl_stppo.statistics import wilson_interval
from trl_stppo.trainer.verifiers import published_critic

ROOT = Path(__file__).parents[1]
FIRST = ROOT / "scripts" / "assets" / "search-agent"
NUMBERS = (1, 2, 4, 8)


def short_demo(folder: Path) -> Path:
    """Two rollouts of the demo."""
    flags = ["--total_episodes", "256", "--eval_episodes", "0", "--output_dir", str(folder)]
    command = [sys.executable, "scripts/train_stppo.py", "--config", "scripts/configs/demo.yaml"]
    subprocess.run([*command, *flags], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


def measured(agent: Agent, critic: Any, rows: list[dict[str, Any]], candidates: int) -> dict:
    """Success of an agent, with so many candidates per turn."""
    started = time.process_time()
    verifier = None if candidates == 1 else critic
    options = {"greedy": False, "parallel": 100, "candidates": candidates, "verifier": verifier}
    episodes = agent.run_many(StdlibSearchEnv, rows, **options)
    seconds = time.process_time() - started
    solved = sum(bool(episode.success) for episode in episodes)
    turns = sum(len(episode.turns) for episode in episodes) / len(episodes)
    interval = wilson_interval(solved, len(episodes))
    return {
        "candidates": candidates,
        "success": solved / len(episodes),
        "interval": [round(limit, 3) for limit in interval],
        "turns": turns,
        "cpu_seconds_per_episode": seconds / len(episodes),
    }


def main() -> None:
    """Measure, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agent", default="runs/demo", help="folder of the trained demo")
    parser.add_argument("--questions", type=int, default=600)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    numbers, questions = (NUMBERS[:2], 24) if args.quick else (NUMBERS, args.questions)
    rows = list(StdlibSearchEnv.datasets()["stdlib-search"]("test"))[:questions]
    with tempfile.TemporaryDirectory() as folder:
        trained = str(short_demo(Path(folder) / "demo")) if args.quick else args.agent
        last, first = (Agent.from_pretrained(str(path)) for path in (trained, FIRST))
        critic = published_critic(trained, last.model)
        first = Agent(first.model, first.tokenizer, last.settings)
        figures: dict[str, Any] = {"quick": args.quick}
        for name, agent in (("first", first), ("trained", last)):
            figures[name] = [measured(agent, critic, rows, number) for number in numbers]
            for line in figures[name]:
                print(name, line, flush=True)
    finish(figures)


if __name__ == "__main__":
    main()
