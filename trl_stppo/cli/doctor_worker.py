"""One measurement of `trl-stppo doctor`, in a process of its own: the last line that it prints tells it.

A run is read from flags of `train` as `estimate` reads them, and trained by the trainer that they name.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from datasets import Dataset
from transformers.utils.logging import disable_progress_bar
from trl import get_peft_config, get_quantization_config

from ..models.memory import FITS, GIB, Setup, estimate
from .doctor_models import Figures, random_model, sampling, subject, timed, vllm_sampling
from .doctor_report import FOUND, is_out_of_memory, private, train_flops
from .dry_run import Findings, parsed
from .early import quieten
from .launches import launcher
from .planned import Plan, planned_setup

ROW = [{"role": "user", "content": "a a a"}]
TURNS = 4
# Tokens are clipped from the second epoch on, which costs ST-PPO a second backward pass.
EVERY = (
    "--output_dir run --variant st-ppo --num_ppo_epochs 2 --num_mini_batches 1 "
    "--per_device_train_batch_size 1 --cliprange 1e-6 --save_strategy no --report_to none "
    f"--logging_steps 1 --disable_tqdm true --max_turns {TURNS}"
)
ADAPTERS = " --use_peft true --lora_target_modules all-linear --dtype bfloat16"
FOUR_BITS = " --load_in_4bit true --use_bnb_nested_quant true"
METHODS = {"full": "", "lora": ADAPTERS, "qlora": ADAPTERS + FOUR_BITS}


class Notes:
    """Answers every turn with a note of so many words, each a token, until the turns are over."""

    def __init__(self, words: int) -> None:
        self._words = words

    def reset(self, **row: Any) -> tuple[str, Figures]:
        """Start."""
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, Figures]:
        """Answer; a turn earns its length."""
        return " a" * self._words, len(action) / 1000, False, False, {}


# ----------------------------------------------------------------------- measurements


def machine(spec: Figures) -> Figures:
    """The card, and what a product of two matrices in bfloat16 reaches on it."""
    cuda = torch.cuda.is_available()
    facts: Figures = {"device": "CPU", "devices": 0}
    if cuda:
        card = torch.cuda.get_device_properties(0)
        facts = {"device": card.name, "devices": torch.cuda.device_count()}
        free, total = torch.cuda.mem_get_info()
        facts |= {"memory_gib": total / GIB, "free_gib": free / GIB}
        facts["compute_capability"] = f"{card.major}.{card.minor}"
        facts["cuda"] = torch.version.cuda or torch.version.hip
        if card.major < 8:
            return facts | {"unfit": "this card computes no bfloat16"}
    size, place = (8192, "cuda") if cuda else (512, "cpu")
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=place) for _ in range(2))
    seconds = min(timed(lambda: [a @ b for _ in range(3)]) for _ in range(10))
    return facts | {"matrix_peak_tflops": 3 * 2 * size**3 / seconds / 1e12}


def training(spec: Figures) -> Figures:
    """Some optimizer steps, and their memory beside what is expected of them."""
    config, tokenizer = subject(spec)
    plan, setup = planned(spec, config, tokenizer)
    expected, cuda = estimate(setup), torch.cuda.is_available()
    figures: Figures = {"predicted_gib": (expected.peak - expected.overhead) / GIB}
    card = torch.cuda.get_device_properties(0).total_memory if cuda else expected.peak * 2
    if expected.peak > FITS * card:
        said = f"{expected.peak / GIB:.1f} GiB expected, above {FITS:.0%} of {card / GIB:.1f} GiB"
        return figures | {"skipped": said}
    try:
        trainer = made_trainer(spec, plan, config, tokenizer)
        if cuda:  # what loading takes for a moment is no part of the prediction
            figures["load_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
        figures |= speeds(trainer.state.log_history, setup, spec["tokens"])
        figures["optimizer_steps"] = trainer.state.global_step
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        figures["out_of_memory"] = True
    if cuda:
        figures["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
        figures["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    return figures


def planned(spec: Figures, config: Any, tokenizer: Any) -> tuple[Plan, Setup]:
    """The run as `estimate` reads it from flags, its model from a folder without weights."""
    folder = f"model-{os.environ.get('RANK', 0)}"
    config.save_pretrained(folder)
    prompt = len(tokenizer.apply_chat_template(ROW, add_generation_prompt=True)["input_ids"])
    words = [
        "--model_name_or_path",
        folder,
        *EVERY.split(),
        *METHODS[spec["method"]].split(),
        *spec.get("flags", []),
    ]
    words += ["--max_completion_length", str(spec["tokens"] - prompt)]
    words += ["--max_turn_tokens", str(spec["turn_tokens"]), "--max_steps", str(spec["steps"])]
    for name in ("gradient_accumulation_steps", "generation_slots"):
        words += [f"--{name}", str(spec["episodes"])]
    if spec["method"] == "qlora" and torch.cuda.is_available():
        words += ["--optim", "paged_adamw_8bit"]
    plan = parsed(words, launcher(words), Findings())
    plan.prompt = prompt
    setup = planned_setup(plan)
    if isinstance(setup, str):
        raise RuntimeError(f"The memory of this run is not known: {setup}.")
    return plan, setup


def made_trainer(spec: Figures, plan: Plan, config: Any, tokenizer: Any) -> Any:
    """The trainer that the flags describe, with a model that no disk has to hold."""
    model_args, args = plan.model_args, plan.config
    left = args.max_completion_length - TURNS * args.max_turn_tokens
    model = random_model(
        config,
        "bfloat16" if model_args.use_peft else "float32",
        quantization_config=get_quantization_config(model_args),
        attn_implementation=model_args.attn_implementation,
    )
    return plan.trainer_class(
        model=model,
        args=args,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": [ROW] * spec["episodes"] * 8}),
        peft_config=get_peft_config(model_args),
        # The template's own tokens come on top of a note.
        environment_factory=lambda: Notes(left // (TURNS - 1) - 4),
    )


def speeds(history: list[dict[str, float]], setup: Setup, tokens: int) -> Figures:
    """Of the fastest step of a process: none of the first, in which kernels are chosen and compiled."""
    names = [f"{phase}_tokens_per_second" for phase in ("rollout", "update")]
    found = {
        name: max(log[f"perf/{name}"] for log in history if f"perf/{name}" in log) for name in names
    }
    return found | {"update_tflops": train_flops(setup, tokens) * found[names[1]] / 1e12}


MEASURES = {"machine": machine, "training": training, "sampling": sampling, "vllm": vllm_sampling}


def main(words: list[str]) -> int:
    """Measure, and print what was found behind a word that no library prints."""
    spec, code = json.loads(words[0]), 0
    quieten([])
    disable_progress_bar()
    try:
        figures = MEASURES[spec["measure"]](spec)
    except Exception as error:
        code = 0 if is_out_of_memory(error) else 1
        told = private(f"{type(error).__name__}: {error}")
        figures = {"failed": told} if code else {"out_of_memory": True}
    if os.environ.get("RANK", "0") == "0" or code:
        print(f"\n{FOUND}{json.dumps(figures)}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
