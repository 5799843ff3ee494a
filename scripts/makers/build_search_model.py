"""Build the small search agent from nothing: tokenizer, chat template, decoder, warm start.

Supervised learning first teaches to copy names (right behaviour only), then a mixture of
behaviours of which some pay; reinforcement learning is meant to take it from there. Everything is
made on the spot from the standard library's documentation, so no download is involved.
"""

import argparse
import os
import random
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

from search_demonstrations import EXPERT, Mixture, conversations, drills
from search_evaluation import evaluate
from stdlib_questions import entries, is_held_out, questions
from trl_stppo.models.small import tiny_config, tiny_tokenizer

DEFAULT_OUTPUT = Path(__file__).parents[1] / "assets" / "search-agent"
MARKERS = ("<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>")
BATCH_SIZE = 32
BUCKET = 16  # batches that are sorted by length together


def main() -> None:
    args = parse_args()
    set_seed(args.seed)
    started = time.perf_counter()
    tokenizer = tiny_tokenizer(tokenizer_texts(), vocab_size=1024, markers=MARKERS)
    model = Qwen2ForCausalLM(tiny_config(tokenizer))
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    warm_start(model, tokenizer, curriculum(args), args)
    model.eval()
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    seconds = time.perf_counter() - started
    count = 64 if args.quick else 400
    result = evaluate(model, tokenizer, questions("test")[:count], seed=args.seed)
    print(f"built in {seconds:.0f} s -> {args.output_dir}")
    print("evaluation: " + " ".join(f"{name}={value:.3f}" for name, value in result.items()))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--steps", type=int, default=8000, help=f"batches of {BATCH_SIZE}")
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="20 steps, to see that it runs")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps is {args.steps}; allowed are 1 and more")
    args.steps = 20 if args.quick else args.steps
    return args


def curriculum(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Drills, then right behaviour, then the mixture, under one learning-rate schedule.

    Right behaviour has to last: which of its two places a question about a method asks for is a
    matter of chance to the model for a thousand batches, and then, within a few hundred, it is not.
    What the warm start cannot tell apart, reinforcement has not taught it either. The mixture has to
    begin while the rate is still high: a model that is certain of the right behaviour by then loses
    its copying when the mixture contradicts it.
    """

    def rows_of(share: float) -> int:
        return max(1, round(args.steps * share)) * BATCH_SIZE

    return [
        *lesson(drills(rows_of(0.25), seed=args.seed)),
        *lesson(conversations(rows_of(0.40), EXPERT, seed=args.seed + 1)),
        *lesson(conversations(rows_of(0.35), Mixture(), seed=args.seed + 2)),
    ]


def tokenizer_texts() -> list[str]:
    """Return the tokenizer's texts: train names and questions, and passages about them."""
    known = [entry for entry in entries() if not is_held_out(entry.name)]
    names = [f" {entry.name}" for entry in known]
    asked = [row["prompt"][0]["content"] for row in questions("train")]
    return [*(f" {entry.passage().text}" for entry in known), *names * 3, *asked]


def lesson(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Order rows so that a batch holds episodes of similar length: less padding, same chance."""
    rng = random.Random(len(rows))
    ordered = []
    for start in range(0, len(rows), BUCKET * BATCH_SIZE):
        bucket = sorted(
            rows[start : start + BUCKET * BATCH_SIZE],
            key=lambda row: sum(len(message["content"]) for message in row["messages"]),
        )
        batches = [bucket[i : i + BATCH_SIZE] for i in range(0, len(bucket), BATCH_SIZE)]
        rng.shuffle(batches)
        ordered += [row for batch in batches for row in batch]
    return ordered


def warm_start(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict[str, Any]],
    args: argparse.Namespace,
) -> None:
    """Supervised learning on the assistant's tokens, one pass in the given order."""
    config = SFTConfig(
        output_dir=str(args.output_dir),
        per_device_train_batch_size=BATCH_SIZE,
        num_train_epochs=1,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(50, args.steps // 10),
        weight_decay=0.01,
        assistant_only_loss=True,
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,  # TRL's own field, whatever transformers calls it
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=100,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=args.seed,
    )
    SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    ).train()


if __name__ == "__main__":
    main()
