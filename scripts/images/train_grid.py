"""Teaches a random vision model the format, then lets it learn from screenshots by ST-PPO.

The warm start plays random moves, so it knows letters and nothing of images. `--blind` shows a grey image:
what is learned then was not seen.

    python scripts/images/train_grid.py --seed 1
"""

import argparse
import random
from functools import partial

import torch
from eyes import vision_model
from grid_env import MOVES, Grid

from trl_stppo import STPPOConfig, STPPOTrainer

WARM_STEPS, WARM_ROWS, WARM_RATE = 60, 64, 3e-3
EPISODES, LAST = 64, 10


def warm_start(model, processor, seed: int) -> None:
    """Train on random moves before random screenshots: the format alone."""
    draw, env, tokenizer = random.Random(seed), Grid(), processor.tokenizer
    optimizer = torch.optim.AdamW(model.parameters(), WARM_RATE)
    asked = [{"role": "user", "content": [{"type": "image"}]}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    for _ in range(WARM_STEPS):
        images = [env.reset(seed=draw.randrange(2**31))[0] for _ in range(WARM_ROWS)]
        texts = [f"{prompt}{draw.choice([*MOVES])}<|end|>" for _ in images]
        batch = processor(images=images, text=texts, return_tensors="pt")
        labels = batch["input_ids"].clone()
        labels[:, :-2] = -100
        model(**batch, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    """Train, and print the share of solved grids of the last rollouts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rollouts", type=int, default=100)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--blind", action="store_true")
    parser.add_argument("--output_dir", default="runs/images")
    options = parser.parse_args()
    model, processor = vision_model(options.seed)
    warm_start(model, processor, options.seed)
    args = STPPOConfig(
        output_dir=f"{options.output_dir}/{'blind' if options.blind else 'seeing'}-{options.seed}",
        per_device_train_batch_size=EPISODES // 2,
        gradient_accumulation_steps=2,
        num_mini_batches=2,
        num_ppo_epochs=2,
        max_steps=options.rollouts * 4,
        learning_rate=options.rate,
        critic_learning_rate=options.rate,
        lr_scheduler_type="constant",
        kl_coef=0.0,
        max_completion_length=96,
        max_turns=4,
        max_turn_tokens=3,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        logging_steps=4,
        save_strategy="no",
        seed=options.seed,
    )
    trainer = STPPOTrainer(
        model=model,
        args=args,
        processing_class=processor,
        environment_factory=partial(Grid, options.blind),
    )
    trainer.train()
    scores = [log["episode/score"] for log in trainer.state.log_history if "episode/score" in log]
    solved = sum(scores[-LAST:]) / len(scores[-LAST:])
    print(f"{'blind' if options.blind else 'seeing'}, seed {options.seed}: {solved:.2f} solved")


if __name__ == "__main__":
    main()
