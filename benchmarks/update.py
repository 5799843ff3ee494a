"""Update speed and memory: our trainers and TRL 1.16's GRPO.

All get the same fixed batch of episodes, the same micro-batches and one optimizer step per batch, each
in a process of its own, through its own `train()`. Measured is the update alone: from the first
training forward to after the optimizer's step. Tokens per second count prompt and completion
without padding, so computed padding lowers the figure; `--equal` makes all episodes equally long.
With one thread on the CPU, seconds are the process's own (see
`_update_probe.py`).

    main     every subject on the batch; for ours also where the time goes
    clip     the extra time of st-ppo over ppo, in turn, by how much is clipped
    prefix   packed updates behind a common prompt, without and with a critic, beside TRL's GRPO

    python benchmarks/update.py             # about 20 minutes on one thread
    python benchmarks/update.py --quick     # under a minute
    python benchmarks/update.py --model smollm2 --only prefix    # after `make pretrained`; 20 minutes
    python benchmarks/update.py --device cuda --model qwen2.5-1.5b --lengths 2048 8192 --qlora

Under `lora` our policy and critic share one backbone.

The last line is JSON with every figure.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from _outcome import finish
from _update_batch import Episode, make_episodes, prefix_episodes, tokens
from _update_runs import clip_pairs, run, summarise
from _update_tables import brief, show_clip, show_main, show_phases
from geometries import GEOMETRIES, save_random_model
from rich.console import Console

Job = dict[str, Any]
SMOLLM2 = Path(__file__).parents[1] / "runs" / "pretrained" / "smollm2-135m-instruct"
# Tokens of the common prompt, number of episodes, tokens of the longest; whether lengths are log-normal.
PREFIXES = (
    (400, 8, 100, False),
    (400, 8, 180, True),
    (100, 8, 60, False),
    (43, 32, 15, False),
    (0, 8, 225, True),
)
VARIANTS = ("ppo", "turn-ppo", "s-ppo", "st-ppo")


def subjects(options: argparse.Namespace) -> Iterator[tuple[str, Job]]:
    """Name, and what differs from the common job."""

    def ours(variant: str, tuning: str, checkpointing: bool = False) -> tuple[str, Job]:
        name = f"ours {variant} {tuning}" + (" ckpt" if checkpointing else "")
        job = {"variant": variant, "tuning": tuning, "checkpointing": checkpointing}
        return name, {"kind": "ours", **job}

    def grpo(checkpointing: bool = False) -> tuple[str, Job]:
        name = "trl-1.16 grpo lora" + (" ckpt" if checkpointing else "")
        return name, {"kind": "grpo", "tuning": "lora", "checkpointing": checkpointing}

    yield ours("st-ppo", "lora")
    yield grpo()
    if options.quick:
        return
    yield ours("st-ppo", "lora", True)
    yield grpo(True)
    yield ours("st-ppo", "lora+separate")
    yield ours("st-ppo", "full")
    if options.qlora:
        yield ours("st-ppo", "qlora")
    yield from (ours(variant, "lora") for variant in VARIANTS[:-1])


def common_job(options: argparse.Namespace, folder: str, longest: int) -> tuple[Job, list[Episode]]:
    """Return the common part of all jobs and the batch, which is written where workers find it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    episodes = make_episodes(options.episodes, longest, tokenizer.eos_token_id, equal=options.equal)
    path = Path(folder) / f"episodes-{longest}.json"
    path.write_text(json.dumps(episodes))
    job = {
        "model": folder,
        "episodes": str(path),
        "num_episodes": options.episodes,
        "longest": longest,
        "micro": options.micro_batch,
        "updates": options.repeats + options.warmup,
        "device": options.device,
        "threads": options.threads,
        "dtype": "bfloat16" if options.device == "cuda" else "float32",
        "variant": "st-ppo",
        "tuning": "lora",
        "checkpointing": False,
        "paced": False,
    }
    return job, episodes


def measure(
    options: argparse.Namespace, console: Console, folder: str, longest: int
) -> dict[str, Any]:
    """All sections for one length of the longest episode."""
    job, episodes = common_job(options, folder, longest)
    result: dict[str, Any] = {"tokens": tokens(episodes)}
    if "main" in options.only:
        main = result["main"] = {}
        for name, differs in subjects(options):
            if options.subjects and name not in options.subjects:
                continue
            done = run({**job, **differs})
            main[name] = summarise(done, result["tokens"], options.warmup)
            console.print(f"{name}: {brief(main[name])}", highlight=False, markup=False)
        show_main(
            console,
            main,
            f"{options.model}, {options.episodes} episodes up to {longest} tokens "
            f"({result['tokens']} in all), micro-batches of {options.micro_batch}",
        )
        show_phases(console, main)
    if "prefix" in options.only:
        result["prefix"] = measure_prefixes(options, console, job)
    if "clip" in options.only:
        length = min(longest, options.clip_length or max(128, longest // 4))
        short, batch = common_job(options, folder, length)
        result["clip"] = clip_pairs(short, batch, options.clip_repeats)
        show_clip(console, result["clip"], f"clipping-bias correction, episodes up to {length}")
    return result


def measure_prefixes(
    options: argparse.Namespace, console: Console, job: Job
) -> dict[str, dict[str, Any]]:
    """Update times behind a common prompt: TRL's GRPO, ours without a critic, and with one."""
    results, eos = {}, transformers.AutoTokenizer.from_pretrained(job["model"]).eos_token_id
    for prefix, count, longest, ragged in PREFIXES[3:4] if options.quick else PREFIXES:
        episodes = prefix_episodes(prefix, count, longest, eos, ragged=ragged)
        Path(job["episodes"]).write_text(json.dumps(episodes))
        shape = {"num_episodes": count, "micro": count, "longest": longest, "kl_coef": 0.0}
        name = f"{prefix}, {count} x {'up to ' * ragged}{longest}"
        rounds = []
        for _ in range(options.pairs):
            rounds.append(measure_round(options, {**job, **shape}, tokens(episodes)))
            for subject, figures in rounds[-1].items():
                console.print(f"{name}, {subject}: {brief(figures)}", highlight=False, markup=False)
        results[name] = {"rounds": rounds, "ratios": median_ratios(rounds)}
        for subject, ratios in results[name]["ratios"].items():
            console.print(f"{name}, {subject}: {ratios}", highlight=False, markup=False)
    return results


def measure_round(options: argparse.Namespace, job: Job, count: int) -> dict[str, Any]:
    """Every subject once, one after the other."""
    subjects = {"grpo": "grpo", "ours": "critic-free", "ours with critic": "ours"}
    if options.quick:
        # One subject shows whether policy and critic go packed.
        subjects = {"ours with critic": "ours"}
    done: dict[str, Any] = {}
    for name, kind in subjects.items():
        done[name] = summarise(run({**job, "kind": kind}), count, options.warmup)
        if done[name].get("packed") == 0.0:
            done[name]["error"] = f"{options.model} goes padded"
    return done


def median_ratios(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over rounds: GRPO's time over ours, ours over that of bare padded passes."""
    failed = any("error" in figures for done in rounds for figures in done.values())
    if failed or "grpo" not in rounds[0]:
        return {}
    ratios = {}
    for name in rounds[0].keys() - {"grpo"}:
        faster = [done["grpo"]["seconds"] / done[name]["seconds"] for done in rounds]
        share = [done[name]["seconds"] / done["grpo"]["padded_seconds"] for done in rounds]
        ratios[name] = {
            "times_as_fast": round(statistics.median(faster), 2),
            "over_padded_passes": round(statistics.median(share), 2),
        }
    return ratios


def parse() -> argparse.Namespace:
    """Command line, with the defaults that depend on each other filled in."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=[*GEOMETRIES, "smollm2"])
    parser.add_argument("--lengths", type=int, nargs="+", help="longest episodes, 512 to 8192")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--episodes", type=int, default=24)
    parser.add_argument(
        "--equal", action="store_true", help="all episodes equally long: no padding"
    )
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, help="measured updates per subject")
    parser.add_argument("--pairs", type=int, default=1, help="rounds of the prefix section")
    parser.add_argument("--clip-repeats", type=int, help="pairs per case")
    parser.add_argument("--clip-length", type=int, help="longest episode of the clip section")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--qlora", action="store_true", help="4-bit subjects too; slow on the CPU")
    parser.add_argument("--quick", action="store_true", help="under a minute: a tiny model")
    sections = ["main", "clip", "prefix"]
    parser.add_argument("--only", nargs="+", choices=sections)
    parser.add_argument("--subjects", nargs="+", help="only these of the main table, by name")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    options.only = options.only or (sections if options.quick else sections[:2])
    options.model = options.model or ("tiny" if options.quick else "small")
    options.lengths = options.lengths or ([128] if options.quick else [512])
    options.repeats = options.repeats or (3 if cuda else 1)
    options.clip_repeats = options.clip_repeats or (1 if options.quick else 3)
    options.warmup = int(cuda or options.model == "tiny")
    if options.episodes % options.micro_batch:
        parser.error("--episodes must be a multiple of --micro-batch")
    return options


def main() -> None:
    """Run the sections and print the figures."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no worker outlives this
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 140)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        if options.model == "smollm2":
            shutil.copytree(SMOLLM2, folder, dirs_exist_ok=True)
        else:
            save_random_model(options.model, folder, dtype=dtype, device=options.device)
        for longest in options.lengths:
            results[str(longest)] = measure(options, console, folder, longest)
    finish({**vars(options), "results": results})


if __name__ == "__main__":
    main()
