"""Update speed and memory: our trainers and TRL 1.16's GRPO.

All get the same fixed batch of episodes, the same micro-batches and one optimizer step per batch, each
in a process of its own, through its own `train()`. Measured is the update alone: from the first
training forward to after the optimizer's step. Tokens per second count prompt and completion
without padding, so computed padding lowers the figure; `--equal` makes all episodes equally long.
On the CPU, with one thread, seconds are the process's own (see `_probe.py`).

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
from _episodes import Episode, clip_cases, clipped_share, make_episodes, prefix_episodes, tokens
from _launch import ONE_THREAD, Worker, WorkerError, launch
from _outcome import finish
from _update_tables import brief, show_clip, show_main, show_phases
from geometries import GEOMETRIES, SMOLLM2, save_random_model

Job = dict[str, Any]
# Tokens of the common prompt, number of episodes, tokens of the longest; whether lengths are log-normal.
PREFIXES = (
    (400, 8, 100, False),
    (400, 8, 180, True),
    (100, 8, 60, False),
    (43, 32, 15, False),
    (0, 8, 225, True),
)
WORKER = "_update_worker.py"


def subjects(options: argparse.Namespace) -> Iterator[tuple[str, Job]]:
    """Name, and what differs from the common job."""
    wanted = [("st-ppo", "lora", False), ("grpo", "lora", False)]
    if not options.quick:
        wanted += [("st-ppo", "lora", True), ("grpo", "lora", True)]
        tunings = ("lora+separate", "full", *["qlora"] * options.qlora)
        wanted += [("st-ppo", tuning, False) for tuning in tunings]
        wanted += [(variant, "lora", False) for variant in ("ppo", "turn-ppo", "s-ppo")]
    for variant, tuning, checkpointing in wanted:
        name = "trl-1.16 grpo" if variant == "grpo" else f"ours {variant}"
        job = {"variant": variant, "tuning": tuning, "checkpointing": checkpointing}
        yield f"{name} {tuning}{' ckpt' * checkpointing}", job


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
        "dtype": "bfloat16" if options.device == "cuda" else "float32",
        "variant": "st-ppo",
        "tuning": "lora",
        "checkpointing": False,
        "paced": False,
    }
    return job, episodes


def measured(job: Job, count: int, warmup: int) -> dict[str, Any]:
    """One subject from start to end: median times and largest peaks of its updates."""
    done = launch(WORKER, json.dumps(job), **ONE_THREAD)
    if "error" in done:
        return done
    updates = done.pop("updates")[warmup:]
    seconds = statistics.median(u["seconds"] for u in updates)
    return {
        "seconds": seconds,
        "wall_seconds": statistics.median(u["wall_seconds"] for u in updates),
        "tokens_per_second": count / seconds,
        "update_mb": max(u["update_mb"] for u in updates),
        "whole_mb": max(u["whole_mb"] for u in updates),
        **done,
    }


def measure(options: argparse.Namespace, folder: str, longest: int) -> dict[str, Any]:
    """All sections for one length of the longest episode."""
    job, episodes = common_job(options, folder, longest)
    result: dict[str, Any] = {"tokens": tokens(episodes)}
    if "main" in options.only:
        main = result["main"] = {}
        for name, differs in subjects(options):
            main[name] = measured({**job, **differs}, result["tokens"], options.warmup)
            print(f"{name}: {brief(main[name])}", flush=True)
        show_main(
            main,
            f"{options.model}, {options.episodes} episodes up to {longest} tokens "
            f"({result['tokens']} in all), micro-batches of {options.micro_batch}",
        )
        show_phases(main)
    if "prefix" in options.only:
        result["prefix"] = measure_prefixes(options, job)
    if "clip" in options.only:
        length = min(longest, options.clip_length or max(128, longest // 4))
        short, batch = common_job(options, folder, length)
        result["clip"] = clip_pairs(short, batch, options.clip_repeats)
        show_clip(result["clip"], f"clipping-bias correction, episodes up to {length}")
    return result


def measure_prefixes(options: argparse.Namespace, job: Job) -> dict[str, dict[str, Any]]:
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
                print(f"{name}, {subject}: {brief(figures)}", flush=True)
        results[name] = {"rounds": rounds, "ratios": median_ratios(rounds)}
        for subject, ratios in results[name]["ratios"].items():
            print(f"{name}, {subject}: {ratios}", flush=True)
    return results


def measure_round(options: argparse.Namespace, job: Job, count: int) -> dict[str, Any]:
    """Every subject once, one after the other."""
    variants = {"grpo": "grpo", "ours": "critic-free", "ours with critic": "st-ppo"}
    if options.quick:
        # One subject shows whether policy and critic go packed.
        variants = {"ours with critic": "st-ppo"}
    done: dict[str, Any] = {}
    for name, variant in variants.items():
        done[name] = measured({**job, "variant": variant}, count, options.warmup)
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


def clip_pairs(job: Job, episodes: list[Episode], repeats: int) -> dict[str, Any]:
    """`st-ppo` and `ppo` in turn, on batches in which the same tokens are clipped.

    Both stay loaded and take turns, one update each, so that what slows the machine slows both.
    """
    cases = clip_cases(episodes)
    # The first one warms up.
    order = ["none", *list(cases) * repeats]
    job = {**job, "paced": True, "updates": len(order), "cases": cases}
    variants = ("ppo", "st-ppo")
    workers = [Worker(WORKER, json.dumps({**job, "variant": v}), **ONE_THREAD) for v in variants]
    try:
        seconds: list[list[float]] = []
        for case in order:
            seconds.append([])
            for worker in workers:
                worker.tell(case)
                seconds[-1].append(worker.hear()["seconds"])
        logged = [worker.hear()["clip_fractions"] for worker in workers]
    except WorkerError as error:
        return {"error": str(error)}
    finally:
        for worker in workers:
            worker.close()
    result = {}
    for case, turns in cases.items():
        runs = [i for i, name in enumerate(order) if name == case and i > 0]
        base, ours = zip(*(seconds[i] for i in runs), strict=True)
        extra = [100 * (b / a - 1) for a, b in zip(base, ours, strict=True)]
        result[case] = {
            "ppo": statistics.median(base),
            "st-ppo": statistics.median(ours),
            "extra_percent": statistics.median(extra),
            "extra_percent_each": extra,
            "clipped_wanted": clipped_share(episodes, turns),
            "clipped_logged": [fractions[runs[-1]] for fractions in logged],
        }
    return result


def parse() -> argparse.Namespace:
    """Command line, with the defaults that depend on each other filled in."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=[*GEOMETRIES, "smollm2"])
    parser.add_argument("--lengths", type=int, nargs="+", help="longest episodes, 512 to 8192")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--episodes", type=int, default=24)
    parser.add_argument("--equal", action="store_true", help="all episodes equally long: no padding")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, help="measured updates per subject")
    parser.add_argument("--pairs", type=int, default=1, help="rounds of the prefix section")
    parser.add_argument("--clip-repeats", type=int, help="pairs per case")
    parser.add_argument("--clip-length", type=int, help="longest episode of the clip section")
    parser.add_argument("--qlora", action="store_true", help="4-bit subjects too; slow on the CPU")
    parser.add_argument("--quick", action="store_true", help="under a minute: a tiny model")
    sections = ["main", "clip", "prefix"]
    parser.add_argument("--only", nargs="+", choices=sections)
    options = parser.parse_args()
    cuda = options.device == "cuda"
    options.only = options.only or sections[: 1 if options.quick else 2]
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
    # No worker outlives this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        if options.model == "smollm2":
            shutil.copytree(SMOLLM2, folder, dirs_exist_ok=True)
        else:
            save_random_model(options.model, folder, dtype=dtype, device=options.device)
        for longest in options.lengths:
            results[str(longest)] = measure(options, folder, longest)
    finish({**vars(options), "results": results})


if __name__ == "__main__":
    main()
