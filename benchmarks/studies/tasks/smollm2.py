"""GEM's game of guessing a number (1 to 10 in four guesses), played by SmolLM2-135M-Instruct with LoRA.

smollm2-gem: a turn is the guess alone.
smollm2-spoken: a turn names the range that is left before the guess; it has 15 to 20 tokens.

The model has been taught by a player that keeps to the answers in two guesses of five. Runs are judged by the
game's score, which is nearly 1 for a near miss. `scripts/pretrained/fetch_smollm2.py` brings the model.
"""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path

from _task import Row, Task, made

from trl_stppo.envs.adapters import GemEnv
from trl_stppo.rollout.chat import with_opening

PRETRAINED = Path(__file__).parents[3] / "scripts" / "pretrained"
sys.path.append(str(PRETRAINED))

SYSTEM = {
    "gem": r"Answer with \boxed{number} alone.",
    "spoken": r"Say which numbers are left, then guess with \boxed{number}.",
}
NUMBERS, GUESSES, GAMES = 10, 4, 32
make_env = partial(GemEnv, "game:GuessTheNumber-v0-easy")


def rows(form: str, split: str, folder: Path, most: int | None) -> list[Row]:
    """Return a row per seed of the game; 48 of the held-out ones."""
    prompt = [{"role": "system", "content": SYSTEM[form]}, {"role": "user", "content": ""}]
    seeds = GemEnv.datasets()["gem-seeds"](split)["seed"][: 48 if split == "test" else most]
    return [{"prompt": prompt, "seed": seed} for seed in seeds]


def play(form: str, row: Row, player: random.Random) -> list[Row]:
    """Play a careless game and return a row of `prompt` and `completion` per turn."""
    env, turns = make_env(), []
    messages = with_opening(row["prompt"], env.reset(seed=row["seed"])[0])
    low, high, over = 1, NUMBERS, False
    while not over:
        least, most = (low, high) if player.random() < 0.4 else (1, NUMBERS)
        guess = player.randint(least, most)
        text = rf"\boxed{{{guess}}}"
        text = f"From {least} to {most} are left. {text}" if form == "spoken" else text
        said = {"role": "assistant", "content": text}
        turns.append({"prompt": [*messages], "completion": [said]})
        answer, _, terminated, truncated, _ = env.step(text)
        over = terminated or truncated
        low = max(low, guess + 1) if "higher than" in answer else low
        high = min(high, guess - 1) if "lower than" in answer else high
        messages += [said, {"role": "user", "content": answer}]
    return turns


def agent(form: str, folder: Path, number: int, short: int | None) -> Path:
    """Return the folder of the taught model."""
    from fetch_smollm2 import OUTPUT
    from train_number_game import teach

    def make(target: Path) -> None:
        player = random.Random(number)
        games = rows(form, "train", folder, None)[-(short or GAMES) :]
        turns = [turn for row in games for turn in play(form, row, player)]
        teach(str(OUTPUT), target, turns, seed=number)

    return made(folder / f"smollm2-{form}-agent-{number}{f'-{short}' if short else ''}", make)


def task(form: str, turn_tokens: int) -> Task:
    """Return a task of this form: `docs/pretrained.md` with 16 episodes per rollout, as prompts are long."""
    from train_number_game import LORA

    return Task(
        agent=partial(agent, form),
        rows=partial(rows, form, "train"),
        player={"environment_factory": make_env, "peft_config": LORA},
        args={
            "learning_rate": 1e-3,
            "max_turns": GUESSES,
            "max_turn_tokens": turn_tokens,
            "max_completion_length": 320,
        },
        critic={"critic_learning_rate": 1e-3},
        episodes=16,
        mini_batches=1,
        measure="reward",
        held_out=partial(rows, form, "test"),
    )


TASKS = {"smollm2-gem": task("gem", 8), "smollm2-spoken": task("spoken", 24)}
