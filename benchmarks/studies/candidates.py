"""What drawing several turns and playing the best is worth on the demo, and what it costs.

Two agents play the demo's held-out questions: the one that it begins with and the one that it ends with.
Who chooses is the critic of the latter's run, or a judge: a process reward model, here the first agent's
own model, taught which turns of 2,000 of its episodes, on questions for training, led to success.

    make demo && python benchmarks/studies/candidates.py --agent runs/demo    # ten minutes on one core
    python benchmarks/studies/candidates.py --quick                           # a short training, 24 questions

The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).parents[1]))  # for _outcome

import torch
from _outcome import finish

from trl_stppo import Agent
from trl_stppo.models.label_scorer import LabelTokenScorer
from trl_stppo.recipes.search import StdlibSearchEnv
from trl_stppo.statistics import wilson_interval
from trl_stppo.trainer.verifiers import published_critic

ROOT = Path(__file__).parents[2]
FIRST = ROOT / "scripts" / "assets" / "search-agent"
NUMBERS = (1, 2, 4, 8)
# In few tokens, since the model has seen no others; the field of the answers is not used.
TEMPLATE = "{task}\n{history}\n{action}\n"


def short_demo(folder: Path) -> Path:
    """Two rollouts of the demo."""
    flags = ["--total_episodes", "256", "--eval_episodes", "0", "--output_dir", str(folder)]
    command = [sys.executable, "scripts/train_stppo.py", "--config", "scripts/configs/demo.yaml"]
    subprocess.run([*command, *flags], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


def taught_judge(agent: Agent, rows: list[dict[str, Any]], epochs: int = 4) -> LabelTokenScorer:
    """A copy of the agent's model that says of a turn whether its episode will succeed."""
    judge = LabelTokenScorer(
        copy.deepcopy(agent.model),
        agent.tokenizer,
        template=TEMPLATE,
        max_history=600,
        batch_size=64,
    )
    episodes = agent.run_many(StdlibSearchEnv, rows, greedy=False, parallel=100)
    turns = [
        (judge._ids(judge._question(episode.messages[:i], message["content"])), episode.success)
        for episode in episodes
        for i, message in enumerate(episode.messages)
        if message["role"] == "assistant"
    ]
    optimizer = torch.optim.AdamW(judge.model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for part in torch.randperm(len(turns), generator=draw).split(32):
            ids = [torch.tensor(turns[i][0]) for i in part]
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
            logits = judge.model(input_ids=padded).logits
            last = logits[torch.arange(len(ids)), torch.tensor([len(row) - 1 for row in ids])]
            won = torch.tensor([float(bool(turns[i][1])) for i in part])
            margin = last[:, judge._yes] - last[:, judge._no]
            torch.nn.functional.binary_cross_entropy_with_logits(margin, won).backward()
            optimizer.step()
            optimizer.zero_grad()
    return judge


def measured(agent: Agent, chooser: Any, rows: list[dict[str, Any]], candidates: int) -> dict:
    """Success of an agent, with so many candidates per turn."""
    started = time.process_time()
    verifier = None if candidates == 1 else chooser
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
        lessons = list(StdlibSearchEnv.datasets()["stdlib-search"]("train"))[
            : 64 if args.quick else 2000
        ]
        judge = taught_judge(first, lessons)
        figures: dict[str, Any] = {"quick": args.quick, "lessons": len(lessons)}
        for name, agent in (("first", first), ("trained", last)):
            for who, chooser in (("critic", critic), ("judge", judge)):
                lines = [measured(agent, chooser, rows, number) for number in numbers]
                figures[f"{name}, {who}"] = lines
                for line in lines:
                    print(name, who, line, flush=True)
    finish(figures)


if __name__ == "__main__":
    main()
