"""Peak memory of training on a CPU, measured beside what the memory model expects.

Each setting runs `STPPOTrainer.train()` in a process of its own: one rollout batch, then epochs over it
in which tokens are clipped, so that the clipping bias is measured too. The peak is the kernel's own
(VmHWM), above what is resident once the libraries are imported; the allocator is told to give memory back
at once. `gpu.py` measures a card. The last line is JSON with every figure.

    python benchmarks/memory.py                     # the settings on `small`, minutes
    python benchmarks/memory.py --quick             # under a minute on two cores
    python benchmarks/memory.py --model qwen2.5-0.5b --rows 2 --lengths 512 1024
    python benchmarks/memory.py --tables            # no training: the tables of docs/one_gpu.md
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from _episodes import QUIET, fixed, make_episodes
from _launch import launch, send
from _memory_model import (
    FITS,
    GIB,
    OVERHEAD,
    peak,
    policy_shape,
    read_setup,
    settings_of,
)
from _outcome import finish
from _probe import Gauge
from geometries import GEOMETRIES, four_bit, geometry, lora, save_random_model, separate_critic
from transformers import AutoModelForSequenceClassification, AutoTokenizer, logging
from trl import ModelConfig, TrlParser, get_peft_config

from trl_stppo import STPPOConfig, STPPOTrainer
from trl_stppo.cli.flags import TrainArguments
from trl_stppo.models.critic import SeparateCritic, SharedCritic

SETTINGS = {
    "full": "full fine-tuning, critic of its own",
    "lora-shared": "LoRA, critic on the same backbone",
    "lora-separate-lora": "LoRA, separate critic with LoRA",
    "lora-separate-full": "LoRA, separate critic fully trained",
    "qlora-shared": "QLoRA, critic on the same backbone",
}
PROMPT = 16
FILES = sorted((Path(__file__).parents[1] / "scripts" / "configs").glob("single_gpu_*.yaml"))
CARDS, LENGTHS = (16, 24, 48, 80), (1024, 2048, 4096, 8192, 16384, 32768)
# Larger models fit on none of the cards if they are fully trained.
FULL = ("0.5b", "1.5b")


# ------------------------------------------------------------------------- measuring


def make_trainer(run: dict[str, Any]) -> STPPOTrainer:
    """The trainer of one setting, made the way a user makes it."""
    setting, folder, dtype = run["setting"], run["folder"], getattr(torch, run["dtype"])
    eos = AutoTokenizer.from_pretrained(folder).eos_token_id
    count, length = run["rows"] * run["accumulation"], run["length"]
    critic = None
    if "separate" in setting:
        critic = separate_critic(folder, dtype, adapters=setting.endswith("lora"))
    return STPPOTrainer(
        **fixed(folder, make_episodes(count, length, eos, equal=True, prompt=PROMPT)),
        args=STPPOConfig(
            output_dir=f"{folder}/run",
            per_device_train_batch_size=run["rows"],
            gradient_accumulation_steps=run["accumulation"],
            num_mini_batches=1,
            num_ppo_epochs=run["epochs"],
            max_steps=run["epochs"],
            max_completion_length=length - PROMPT,
            gradient_checkpointing=run["checkpointing"],
            kl_coef=0.0,
            bf16=run["autocast"] or run["dtype"] == "bfloat16",
            model_init_kwargs={"dtype": run["dtype"]},
            # Tokens are clipped from the second epoch on, so that a second backward pass is needed.
            cliprange=1e-6,
            use_cpu=True,
            **QUIET,
        ),
        peft_config=lora() if "lora" in setting else None,
        quantization_config=four_bit(dtype) if "qlora" in setting else None,
        value_model=critic,
    )


def subject(run: dict[str, Any]) -> dict[str, Any]:
    """Train one setting in this process."""
    logging.set_verbosity_error()
    torch.ones(8, 8) @ torch.ones(8, 8)
    gauge = Gauge("cpu")
    trainer = make_trainer(run)
    # The kernel reads weights that are mapped from their file when they are touched and drops them
    # when it likes. Copies stay, as on a card.
    for model in (trainer.model, *([] if trainer.uses_shared_critic else [trainer.critic.model])):
        for parameter in filter(torch.is_floating_point, model.parameters()):
            parameter.data = parameter.data.clone()
    models = (trainer.model, trainer.critic, trainer.ref_model)
    expected = peak(read_setup(*models, **{**settings_of(trainer.args, PROMPT), "slots": 0}))
    gauge.reset()
    trainer.train()
    return {"measured": round(1e6 * gauge.peak()), "expected": expected}


def measured(run: dict[str, Any]) -> dict[str, Any]:
    """Run one subject in a process of its own and read its figures."""
    # Blocks from 128 KiB on are mapped and unmapped singly, so that what is freed is no longer counted.
    environment = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "0"}
    figures = launch("memory.py", "--subject", json.dumps(run), **environment)
    shown = {name: value for name, value in run.items() if name != "folder"}
    if "error" in figures:
        return {**shown, **figures}
    sizes = {name: f"{size / GIB:.2f} GiB" for name, size in figures.items()}
    print(run["setting"], run["length"], sizes, file=sys.stderr, flush=True)
    return {**shown, **figures}


# ------------------------------------------------------------------------- expecting


def show_files() -> None:
    """The expected peak of each configuration for one card."""
    parser = TrlParser((TrainArguments, STPPOConfig, ModelConfig))
    for path in FILES:
        words = ["--config", str(path), "--use_cpu", "true"]
        _, args, model = parser.parse_args_and_config(words)
        name = str(model.model_name_or_path).split("/")[1]
        config = geometry(name.lower().removesuffix("-instruct"))
        policy = policy_shape(config, "bfloat16", get_peft_config(model), four_bit=True)
        size = peak(read_setup(policy, SharedCritic(policy), **settings_of(args))) + OVERHEAD
        print(f"| `{path.name}` | {name} | {args.max_completion_length} | {size / GIB:.1f} GiB |")


def show_fits() -> None:
    """The longest episodes that fit: one per micro-batch, eight in flight, `st-ppo`."""
    for name in GEOMETRIES:
        size, config = name.removeprefix("qwen2.5-"), geometry(name)
        for method in ("QLoRA", "LoRA", "full") if size in FULL else ("QLoRA", "LoRA"):
            if size == name:
                continue
            common = {"bias_buffers": 1, "slots": 8, "compute_bytes": 2, "completion": 4096}
            if method == "full":
                policy = policy_shape(config, "float32")
                config.num_labels = 1
                with torch.device("meta"):
                    critic = AutoModelForSequenceClassification.from_config(config)
                setup = read_setup(policy, SeparateCritic(critic), optim="adamw_8bit", **common)
            else:
                policy = policy_shape(config, "bfloat16", lora(), four_bit=method == "QLoRA")
                optim = "paged_adamw_8bit"
                setup = read_setup(policy, SharedCritic(policy), optim=optim, **common)
            sizes = {n: peak(replace(setup, completion=n)) + OVERHEAD for n in LENGTHS}
            longest = [
                str(max((n for n in LENGTHS if sizes[n] <= FITS * card * GIB), default="-")) for card in CARDS
            ]
            cells = [size.upper(), method, f"{sizes[4096] / GIB:.1f} GiB", *longest]
            print(f"| {' | '.join(cells)} |")


def main() -> None:
    """Run the settings and print the figures, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under a minute on two cores")
    parser.add_argument("--tables", action="store_true", help="tables of docs/one_gpu.md")
    parser.add_argument("--model", choices=list(GEOMETRIES))
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens, prompt included")
    parser.add_argument("--rows", type=int, default=2, help="episodes per micro-batch")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--no_checkpointing", action="store_true")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--autocast", action="store_true", help="compute float32 in bfloat16")
    parser.add_argument("--subject", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.subject:
        return send(subject(options.subject))
    if options.tables:
        show_files()
        return show_fits()
    name = options.model or ("tiny" if options.quick else "small")
    settings = options.settings
    if options.quick and settings == list(SETTINGS):
        settings = ["lora-shared", "lora-separate-lora"]
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(name, folder, dtype=getattr(torch, options.dtype))
        common = {"model": name, "folder": folder, "checkpointing": not options.no_checkpointing}
        common |= {n: getattr(options, n) for n in ("rows", "accumulation", "epochs")}
        common |= {"dtype": options.dtype, "autocast": options.autocast}
        runs = [
            measured({**common, "setting": setting, "length": length})
            for setting in settings
            for length in options.lengths or ([256] if options.quick else [512])
        ]
    finish({"runs": runs})


if __name__ == "__main__":
    main()
