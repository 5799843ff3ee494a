"""Peak memory of training, measured beside what the memory model expects.

Each setting runs `STPPOTrainer.train()` in a process of its own: one rollout batch, then epochs over it
in which tokens are clipped, so that the clipping bias is measured too.

    python benchmarks/memory.py                     # the settings on `small`, minutes
    python benchmarks/memory.py --quick             # under a minute on two cores
    python benchmarks/memory.py --model qwen2.5-0.5b --rows 2 --lengths 512 1024
    python benchmarks/memory.py --fit --device cuda # 7B QLoRA and 1.5B LoRA, real generation

On the CPU the peak is the kernel's own (VmHWM), above what is resident once the libraries are
imported; the allocator is told to give memory back at once. On CUDA it is torch's. The last line is
JSON with every figure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from _outcome import finish
from geometries import GEOMETRIES, save_random_model
from rich.console import Console
from rich.table import Table

SETTINGS = {
    "full": "full fine-tuning, critic of its own",
    "lora-shared": "LoRA, critic on the same backbone",
    "lora-separate-lora": "LoRA, separate critic with LoRA",
    "lora-separate-full": "LoRA, separate critic fully trained",
    "qlora-shared": "QLoRA, critic on the same backbone",
}
VARIANTS = ("ppo", "turn-ppo", "s-ppo", "st-ppo")
GIB = 2**30
SUBJECT = str(Path(__file__).with_name("memory_subject.py"))
# What `--fit` has to show: geometry, setting, sequence length, most GiB.
FITS = (("qwen2.5-7b", "qlora-shared", 4096, 24.0), ("qwen2.5-1.5b", "lora-shared", 4096, 24.0))


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Run one subject in a process of its own and read its figures."""
    # Blocks from 128 KiB on are mapped and unmapped singly, so that what is freed is no longer counted.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, SUBJECT, json.dumps(spec)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    shown = {k: v for k, v in spec.items() if k not in ("folder", "output_dir")}
    if done.returncode != 0:
        return {**shown, "error": done.stderr.strip().splitlines()[-1] if done.stderr else "killed"}
    return {**shown, **json.loads(done.stdout.strip().splitlines()[-1])}


def specs(
    options: argparse.Namespace, folders: dict[str, str], output: str
) -> list[dict[str, Any]]:
    """The runs that the options ask for, one dictionary each."""
    common = {
        "model": options.model,
        "folder": folders[options.model],
        "output_dir": output,
        "rows": options.rows,
        "accumulation": options.accumulation,
        "epochs": options.epochs,
        "rollouts": 1,
        "checkpointing": not options.no_checkpointing,
        "kl_coef": options.kl_coef,
        "optim": options.optim,
        "dtype": options.dtype,
        "autocast": options.autocast,
        "device": options.device,
        "generate": options.generate,
        "slots": options.slots,
        "turn_tokens": options.turn_tokens,
    }
    return [
        {**common, "setting": setting, "variant": variant, "length": length}
        for setting in options.settings
        for variant in options.variants
        for length in options.lengths
    ]


def fit_specs(options: argparse.Namespace, folders: dict[str, str], output: str) -> list[Any]:
    """QLoRA on 7B and LoRA on 1.5B, generation included; on the CPU the same with `--model`."""
    runs = []
    for model, setting, length, limit in FITS:
        spec = specs(options, {options.model: folders.get(options.model, "")}, output)[0]
        if options.device == "cuda":
            spec.update(model=model, folder=folders[model], length=length, dtype="bfloat16")
            spec.update(slots=8, turn_tokens=256, optim="paged_adamw_8bit")
        spec.update(setting=setting, variant="st-ppo", rows=1, accumulation=8, generate=True)
        spec.update(rollouts=2, epochs=2, limit_gib=limit)
        runs.append(spec)
    return runs


def show(results: list[dict[str, Any]]) -> None:
    """Measured beside expected, in GiB."""
    columns = (
        "model",
        "setting",
        "variant",
        "length",
        "rows",
        "build",
        "train",
        "expected",
        "error",
    )
    table = Table(*columns, "rollout tok/s", "update tok/s", title="peak memory, GiB")
    for run in results:
        head = [str(run[name]) for name in columns[:5]]
        if "error" in run:
            table.add_row(*head, run["error"])
            continue
        expected = run.get("estimate")
        off = f"{expected / run['train_peak'] - 1:+.0%}" if expected else ""
        sizes = [f"{(run.get(k) or 0) / GIB:.2f}" for k in ("build_peak", "train_peak", "estimate")]
        speeds = [run[f"perf/{phase}_tokens_per_second"] for phase in ("rollout", "update")]
        table.add_row(*head, *sizes, off, *[f"{s:.0f}" if s else "" for s in speeds])
    Console(width=160).print(table)


def shared_against_separate(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Peaks with a shared critic over those with a separate LoRA critic, other things equal."""

    def find(setting: str) -> dict[tuple[Any, ...], int]:
        runs = [r for r in results if r["setting"] == setting and "error" not in r]
        return {(r["model"], r["variant"], r["length"], r["rows"]): r["peak"] for r in runs}

    shared, separate = find("lora-shared"), find("lora-separate-lora")
    return [
        {"run": list(key), "ratio": shared[key] / separate[key]} for key in shared.keys() & separate
    ]


def parse() -> argparse.Namespace:
    """The command line, with what `--quick` and `--fit` stand for filled in."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under a minute on two cores")
    parser.add_argument("--fit", action="store_true", help="7B QLoRA and 1.5B LoRA at 4096 tokens")
    parser.add_argument("--model", choices=list(GEOMETRIES))
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["st-ppo"])
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens, prompt included")
    parser.add_argument("--rows", type=int, default=2, help="episodes per micro-batch")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--kl_coef", type=float, default=0.0)
    parser.add_argument("--no_checkpointing", action="store_true")
    parser.add_argument("--generate", action="store_true", help="generate in a text environment")
    parser.add_argument("--slots", type=int, default=4, help="episodes in flight with --generate")
    parser.add_argument("--turn_tokens", type=int, default=32, help="sampled tokens per turn")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--autocast", action="store_true", help="compute float32 in bfloat16")
    parser.add_argument("--optim", default="adamw_torch_fused")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    small = "tiny" if options.quick or options.fit else "small"
    options.model = options.model or ("qwen2.5-7b" if cuda and options.fit else small)
    options.lengths = options.lengths or ([256] if options.quick or options.fit else [512])
    options.dtype = options.dtype or ("bfloat16" if cuda else "float32")
    if options.quick and options.settings == list(SETTINGS):
        options.settings = ["lora-shared", "lora-separate-lora"]
    return options


def main() -> None:
    """Run the settings and print the figures."""
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        names = {options.model} | (
            {name for name, *_ in FITS} if options.fit and options.device == "cuda" else set()
        )
        dtype = getattr(torch, options.dtype)
        folders = {
            name: save_random_model(name, f"{folder}/{name}", dtype=dtype, device=options.device)
            for name in sorted(names)
        }
        if options.device == "cuda":
            torch.cuda.empty_cache()  # the subjects want the whole card
        make = fit_specs if options.fit else specs
        results = [measure(spec) for spec in make(options, folders, f"{folder}/run")]
    show(results)
    ratios = shared_against_separate(results)
    for entry in ratios:
        print(f"shared over separate LoRA critic, {entry['run']}: {entry['ratio']:.2f}")
    for run in results:
        if "limit_gib" in run and "error" not in run:
            print(
                f"{run['model']} {run['setting']}: {run['peak'] / GIB:.2f} GiB, "
                f"limit {run['limit_gib']:.0f}"
            )
    finish({"runs": results, "shared_over_separate": ratios})


if __name__ == "__main__":
    main()
