"""Train SmolLM2-135M-Instruct to guess a number, on two CPU cores, from demonstrations to the evaluation.

python scripts/pretrained/fetch_smollm2.py
python scripts/pretrained/train_number_game.py

Four agents play the same games on ranges that none of them has been trained on: the model itself; the model
taught by a careless player; this one trained by ST-PPO with LoRA; and the taught one taught for as many
minutes more. A step whose folder exists is not done again. The script ends with a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from number_game import GUESSES, HELD_OUT, TRAINED, NumberEnv, careless_game, rows
from trl_stppo import Agent, STPPOConfig, STPPOTrainer
from trl_stppo.cli.main import main as command

HERE = Path(__file__).resolve().parents[2] / "runs" / "pretrained"
LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
Figures = dict[str, float]


class StopAfter(TrainerCallback):
    """Ends a training after a number of seconds."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the training if the time is over."""
        control.should_training_stop |= time.monotonic() > self._end


def demonstrations(games: int, seed: int) -> list[dict[str, Any]]:
    """Return the turns of games of the careless player."""
    player = random.Random(seed)
    return [turn for _ in range(games) for turn in careless_game(player)]


def teach(model: str, folder: Path, turns: list[Any], *, seed: int, seconds: float | None = None) -> None:
    """Train all weights with TRL's SFTTrainer on rows of `prompt` and `completion`, one per turn."""
    config = SFTConfig(
        str(folder),
        per_device_train_batch_size=16,
        num_train_epochs=1,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        completion_only_loss=True,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=4,
        seed=seed,
    )
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(turns),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[StopAfter(seconds)] if seconds else [],
    )
    trainer.train()
    trainer.save_model(str(folder))


def train(model: str, folder: Path, options: argparse.Namespace) -> None:
    """Train the taught model with LoRA, and a critic that is a second adapter on its backbone."""
    config = STPPOConfig(
        str(folder),
        per_device_train_batch_size=options.episodes,
        gradient_accumulation_steps=1,
        total_episodes=options.episodes * options.rollouts,
        num_iterations=2,
        learning_rate=options.learning_rate,
        critic_learning_rate=1e-3,
        lr_scheduler_type="constant",
        kl_coef=0.0,
        max_turns=GUESSES,
        max_turn_tokens=6,
        max_completion_length=96,
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        seed=options.seed,
        **json.loads(options.settings),
    )
    trainer = STPPOTrainer(
        model,
        args=config,
        train_dataset=Dataset.from_list(rows(TRAINED)),
        environment_factory=NumberEnv,
        peft_config=LORA,
    )
    trainer.train()
    if trainer.stop_signal:
        raise SystemExit(128 + trainer.stop_signal)
    trainer.save_model()


def evaluate(folder: str, games: list[dict[str, Any]]) -> list[float]:
    """Return the success of each game, 0 or 1, sampled at temperature 1 from a seed that all agents share."""
    limits = {"max_turns": GUESSES, "max_turn_tokens": 6, "max_completion_length": 96}
    agent = Agent.from_pretrained(folder, **limits)
    episodes = agent.run_many(NumberEnv, games, greedy=False, seed=0, parallel=64)
    return [float(bool(episode.success)) for episode in episodes]


def interval(differences: list[float], games: list[dict[str, Any]]) -> tuple[float, float, float]:
    """Return the mean difference of paired games and its 95 % interval; a number's games are one cluster."""
    clusters: dict[int, list[float]] = {}
    for difference, game in zip(differences, games, strict=True):
        clusters.setdefault(game["number"], []).append(difference)
    means = [statistics.fmean(each) for each in clusters.values()]
    mean, half = statistics.fmean(means), 1.96 * statistics.stdev(means) / len(means) ** 0.5
    return mean, mean - half, mean + half


def main() -> None:
    """Go the whole way, and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=str(HERE / "smollm2-135m-instruct"))
    parser.add_argument("--output", type=Path, default=HERE / "number-game")
    parser.add_argument("--games", type=int, default=64, help="demonstrations of the warm start")
    parser.add_argument("--episodes", type=int, default=48, help="of a rollout")
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--settings", default="{}", help="further fields of STPPOConfig, as JSON")
    parser.add_argument("--evaluated", type=int, default=15, help="games per held-out row, of 28")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    folders = {name: options.output / name for name in ("taught", "trained", "taught longer")}
    minutes: Figures = {}

    def step(name: str, work: Any) -> None:
        """Do a step into a folder that appears when it is complete."""
        final, record = folders[name], folders[name] / "minutes.json"
        if not record.is_file():
            shutil.rmtree(final, ignore_errors=True)
            started = time.monotonic()
            work(final)
            record.write_text(json.dumps((time.monotonic() - started) / 60))
        minutes[name] = json.loads(record.read_text())

    seed, taught = options.seed, str(folders["taught"])
    step(
        "taught",
        lambda f: teach(options.model, f, demonstrations(options.games, seed), seed=seed),
    )
    step("trained", lambda f: train(taught, f, options))
    seconds = 60 * minutes["trained"]
    step(
        "taught longer",
        lambda f: teach(taught, f, demonstrations(4_000, seed + 1), seed=seed + 1, seconds=seconds),
    )
    games = rows(HELD_OUT, options.evaluated)
    started = time.monotonic()
    agents = {"base": options.model, **{name: str(folder) for name, folder in folders.items()}}
    results = {name: evaluate(folder, games) for name, folder in agents.items()}
    minutes["evaluation"] = (time.monotonic() - started) / 60
    command(["trace", taught.replace("taught", "trained")])
    print(f"\n{'agent':<14} {'success':>8}   trained less it, 95 % interval")
    found: dict[str, Any] = {}
    for name, wins in results.items():
        less = [a - b for a, b in zip(results["trained"], wins, strict=True)]
        found[name] = {"success": statistics.fmean(wins), "trained_less": interval(less, games)}
        mean, low, high = found[name]["trained_less"]
        print(f"{name:<14} {found[name]['success']:>8.3f}   {mean:+.3f} [{low:+.3f}, {high:+.3f}]")
    print("\n" + str(Agent.from_pretrained(agents["trained"]).run(NumberEnv, games[0])))
    print(json.dumps({"games": len(games), "minutes": minutes, "agents": found}))


if __name__ == "__main__":
    main()
