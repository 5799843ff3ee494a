"""GEM's three-way comparison in small: PPO, GRPO and REINFORCE with ReBN on one of its games.

    pip install '.[gem]'
    python benchmarks/three_ways.py --seeds 0 1 2          # a quarter of an hour on one core
    python benchmarks/three_ways.py --methods st-rebn --seeds 0
    python benchmarks/three_ways.py --quick                # a minute, to see that it runs

The game is `game:GuessTheNumber-v0-easy`: a number from 1 to 10 in four guesses, each answered with higher or
lower. An agent of 0.1M parameters learns first to write guesses from games of somebody who listens half of
the time; without that it would never be paid. All methods then play the same seeds, 128 episodes per
update in two epochs, at a constant rate, without KL. The last line is JSON.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from _outcome import finish
from rich.console import Console
from rich.table import Table
from transformers import Qwen2ForCausalLM, set_seed

from trl_stppo import STGRPOConfig, STGRPOTrainer, STPPOConfig, STPPOTrainer
from trl_stppo.envs.adapters import GemEnv
from trl_stppo.models.small import tiny_config, tiny_tokenizer
from trl_stppo.trainer.stppo_config import VARIANTS

GAME, LARGEST = "game:GuessTheNumber-v0-easy", 10
EPISODES, GROUP, BATCH = 128, 8, 32
SUCCESS, SCORE, TURNS = "episode/success_rate", "episode/score", "turns/mean"


def careless_game(env: GemEnv, dice: random.Random) -> list[dict[str, str]]:
    """A game of somebody of whose guesses every other one is just any number."""
    low, high, over = 1, LARGEST, False
    opening, _ = env.reset(seed=dice.randrange(2**31))
    said = [{"role": "user", "content": opening}]
    while not over:
        listens = low <= high and dice.random() < 0.5
        guess = dice.randint(low, high) if listens else dice.randint(1, LARGEST)
        answer, _, over, _, _ = env.step(f"\\boxed{{{guess}}}")
        said.append({"role": "assistant", "content": f"\\boxed{{{guess}}}"})
        if not over:
            said.append({"role": "user", "content": answer})
            if "higher" in answer:
                low = max(low, guess + 1)
            elif "lower" in answer:
                high = min(high, guess - 1)
    return said


def build_agent(folder: Path, steps: int) -> Path:
    """Train the agent that all runs begin with, unless it is there."""
    agent = folder / "gem-agent"
    if agent.is_dir():
        return agent
    set_seed(0)
    env, dice = GemEnv(GAME), random.Random(0)
    texts = [message["content"] for _ in range(50) for message in careless_game(env, dice)]
    words = [f"\\boxed{{{number}}}" for number in range(1, LARGEST + 1)]
    tokenizer = tiny_tokenizer(texts, vocab_size=420, markers=[*words, "higher", "lower"])
    # Weights of the usual size do not learn to listen (docs/lab/experiments.md, the tutorial's agent).
    small = {"hidden_size": 64, "intermediate_size": 160, "initializer_range": 0.1}
    model = Qwen2ForCausalLM(tiny_config(tokenizer, **small))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        batch = tokenizer.apply_chat_template(
            [careless_game(env, dice) for _ in range(BATCH)],
            padding=True,
            return_tensors="pt",
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        said = batch.pop("assistant_masks").bool()
        model(**batch, labels=batch["input_ids"].masked_fill(~said, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(agent)
    tokenizer.save_pretrained(agent)
    return agent


def config_of(method: str, seed: int, folder: str, updates: int) -> STPPOConfig:
    """GEM's settings where it states them; the rates are those of an agent of this size."""
    settings: dict[str, Any] = {
        "output_dir": folder,
        "variant": method,
        "seed": seed,
        "per_device_train_batch_size": EPISODES // 4,
        "gradient_accumulation_steps": 4,
        "num_mini_batches": 1,
        "num_ppo_epochs": 2,
        "total_episodes": EPISODES * updates,
        "max_turn_tokens": 4,
        "max_completion_length": 256,
        "learning_rate": 4e-3,
        "lr_scheduler_type": "constant",
        "num_generations_eval": 2,
        "per_device_eval_batch_size": EPISODES,
        "logging_steps": 2,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if method in VARIANTS:
        return STPPOConfig(**settings, gamma=0.9, kl_coef=0.0, critic_learning_rate=1e-3)
    if method.endswith("rebn"):
        return STGRPOConfig(**settings, gamma=0.9, num_generations=1)
    return STGRPOConfig(**settings, num_generations=GROUP)


def run(method: str, seed: int, agent: Path, updates: int) -> dict[str, Any]:
    """Train once; figures of the held-out games before and after, and of the updates."""
    started, rows = time.perf_counter(), GemEnv.datasets()["gem-seeds"]
    with tempfile.TemporaryDirectory() as folder:
        kind = STPPOTrainer if method in VARIANTS else STGRPOTrainer
        trainer = kind(
            model=str(agent),
            args=config_of(method, seed, folder, updates),
            train_dataset=rows("train"),
            eval_dataset=rows("test"),
            environment_factory=partial(GemEnv, GAME),
        )
        before = trainer.evaluate()
        trainer.train()
        after = trainer.evaluate()
        curve = [line[SUCCESS] for line in trainer.state.log_history if SUCCESS in line]
    held_out = {
        name: (before[f"eval_{name}"], after[f"eval_{name}"]) for name in (SUCCESS, SCORE, TURNS)
    }
    seconds = round(time.perf_counter() - started)
    return {"method": method, "seed": seed, **held_out, "curve": curve, "seconds": seconds}


def show(results: list[dict[str, Any]]) -> None:
    """The table."""
    table = Table(title=f"{GAME}, held-out games, before -> after")
    for column in ("method", "seed", "success", "score", "turns", "seconds"):
        table.add_column(column)
    for result in results:
        cells = [f"{a:.3f} -> {b:.3f}" for a, b in (result[n] for n in (SUCCESS, SCORE, TURNS))]
        table.add_row(result["method"], str(result["seed"]), *cells, str(result["seconds"]))
    Console(width=110).print(table)


def main() -> None:
    """Run, print the table, then the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", default=["ppo", "grpo", "rebn"], help="variants")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="two updates of an untaught agent")
    parser.add_argument("--folder", help="keep the agent there")
    options = parser.parse_args()
    if options.quick and find_spec("gem") is None:  # one of many that are tried in turn
        finish({"quick": True, "skipped": "gem-llm is not installed"})
        return
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    updates, steps = (2, 10) if options.quick else (options.updates, 300)
    seeds = options.seeds[:1] if options.quick else options.seeds
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.folder or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        agent = build_agent(folder, steps)
        results = []
        for seed in seeds:
            for method in options.methods:
                results.append(run(method, seed, agent, updates))
                show(results[-1:])
    show(results)
    finish({"quick": options.quick, "game": GAME, "updates": updates, "runs": results})


if __name__ == "__main__":
    main()
