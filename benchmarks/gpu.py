"""Measure this machine: does training run on its GPUs, how fast, with how much memory?

    python benchmarks/gpu.py --only qlora-2k sampler
    python benchmarks/gpu.py --quick

Models of published shapes with random weights are trained for a few steps, each in a process of its own. The
last line is JSON; the exit status is 1 if a measurement failed. What is not installed, or does not fit, is
skipped. `--quick` trains and samples from tiny models, also without a GPU.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from _episodes import QUIET
from _launch import launch, send
from _memory_model import GIB, peak, policy_shape, read_setup, settings_of
from _outcome import finish
from datasets import Dataset
from geometries import four_bit, geometry, lora
from transformers import Qwen2ForCausalLM

from trl_stppo import STPPOConfig, STPPOTrainer
from trl_stppo.generation.cached import CachedBackend
from trl_stppo.generation.protocol import TurnRequest
from trl_stppo.generation.sampling import SamplingSettings
from trl_stppo.models.small import tiny_tokenizer

TURNS = 4
ROW = [{"role": "user", "content": "a a a"}]
FULL = {"model": "qwen2.5-0.5b", "method": "full", "tokens": 2048}
LORA = {"model": "qwen2.5-1.5b", "method": "lora", "tokens": 2048}
QLORA = {"model": "qwen2.5-7b", "method": "qlora", "tokens": 2048, "needs": "bitsandbytes"}
# Name -> shape, method, tokens of an episode, and what it needs.
ROWS: dict[str, dict[str, Any]] = {
    **{"full-2k": {**FULL}, "lora-2k": {**LORA}, "qlora-2k": {**QLORA}},
    "sampler": LORA | {"method": "sample", "tokens": 640},
    "ddp": FULL | {"gpus": 2},
    **{"lora-4k": LORA | {"tokens": 4096}, "qlora-4k": QLORA | {"tokens": 4096}},
    "flash-4k": LORA | {"tokens": 4096, "needs": "flash_attn"},
}


class Notes:
    """An environment that answers every turn with so many words, each a token."""

    def __init__(self, words: int) -> None:
        self.reset = lambda **row: ("", {})
        self.step = lambda action: (" a" * words, len(action) / 1000, False, False, {})


def model_and_tokenizer(spec: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    """A model loaded as from a file, whose weights are pieces of the same random numbers."""
    config = geometry(spec["model"])
    few = len(tiny_tokenizer([" a" * 50]))
    markers = (f"<{number}>" for number in range(config.vocab_size - few))
    tokenizer = tiny_tokenizer([" a" * 50], markers=markers)
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    weights = dict(policy_shape(config, str(dtype).removeprefix("torch.")).named_parameters())
    pool = torch.randn(max(p.numel() for p in weights.values()), dtype=dtype) * 0.02
    pieces = {
        name: torch.ones(p.shape, dtype=dtype) if p.dim() == 1 else pool[: p.numel()].view(p.shape)
        for name, p in weights.items()
    }
    cuda, options = torch.cuda.is_available(), {}
    # On a CPU loading does not copy.
    if not cuda:
        pieces = {name: piece.clone() for name, piece in pieces.items()}
    if spec["method"] == "qlora":
        options["quantization_config"] = four_bit(dtype)
    if spec.get("needs") == "flash_attn":
        options["attn_implementation"] = "flash_attention_2"
    options |= {"device_map": {"": int(os.environ.get("LOCAL_RANK", 0)) if cuda else "cpu"}}
    options |= {"config": copy.deepcopy(config), "state_dict": pieces, "dtype": dtype}
    return Qwen2ForCausalLM.from_pretrained(None, **options), tokenizer


def training(spec: dict[str, Any]) -> dict[str, Any]:
    """Some optimizer steps: speeds, and the peak beside the estimate."""
    full, cuda = spec["method"] == "full", torch.cuda.is_available()
    model, tokenizer = model_and_tokenizer(spec, torch.float32 if full else torch.bfloat16)
    prompt = len(tokenizer.apply_chat_template(ROW, add_generation_prompt=True)["input_ids"])
    length = spec["tokens"] - prompt
    turn = max(1, spec["tokens"] // 32)
    # Tokens are clipped from the second epoch on, so that ST-PPO needs a second backward pass.
    settings = {"num_ppo_epochs": 2, "num_mini_batches": 1, "cliprange": 1e-6, "max_steps": 4}
    batch = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    limits = {"max_turns": TURNS, "max_turn_tokens": turn, "max_completion_length": length}
    quiet = QUIET | {"logging_steps": 1} | ({} if cuda else {"use_cpu": True, "bf16": False})
    if spec["method"] == "qlora":
        settings["optim"] = "paged_adamw_8bit"
    folder = TemporaryDirectory()
    trainer = STPPOTrainer(
        model=model,
        args=STPPOConfig(output_dir=folder.name, **settings, **batch, **limits, **quiet),
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": [ROW] * 64}),
        peft_config=None if full else lora(),
        # The template's own tokens come on top of a note.
        environment_factory=lambda: Notes(max(1, (length - TURNS * turn) // (TURNS - 1) - 4)),
    )
    models = (trainer.model, trainer.critic, trainer.ref_model)
    expected = peak(read_setup(*models, **settings_of(trainer.args, prompt)))
    found = {"expected_gib": expected / GIB}
    # What loading takes for a moment is no part of the estimate.
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    for phase in ("rollout", "update"):
        name = f"perf/{phase}_tokens_per_second"
        found[name] = max(entry.get(name, 0.0) for entry in trainer.state.log_history)
    if cuda:
        found["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    return found


def sampling(spec: dict[str, Any]) -> dict[str, Any]:
    """Sampled tokens per second of our sampler and of `generate`."""
    model, tokenizer = model_and_tokenizer(spec, torch.bfloat16)
    new, pad = spec["tokens"] // 5, tokenizer.pad_token_id
    prompts = [[100 + row] * (4 * new) for row in range(16)]
    ids = torch.tensor(prompts, device=model.eval().device)

    def ours() -> None:
        backend = CachedBackend(model, SamplingSettings(), [], pad_token_id=pad)
        with backend.running():
            for key, prompt in enumerate(prompts):
                backend.add(TurnRequest(key, prompt, new, (0, 0, key, 0)))
            while backend.busy:
                backend.step()

    def upstream() -> None:
        length = {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": pad}
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, **length)

    calls = {"sampler": ours, "generate": upstream}
    rates = {k: len(prompts) * new / [timed(call), timed(call)][1] for k, call in calls.items()}
    return {f"{name}_tokens_per_second": rate for name, rate in rates.items()}


def timed(call: Callable[[], None]) -> float:
    """Seconds until what it starts is done."""
    started = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def row(name: str, quick: bool, seconds: float) -> dict[str, Any]:
    """One measurement in a process of its own, or why there is none."""
    gpus, needs = ROWS[name].get("gpus", 1), ROWS[name].get("needs")
    if needs and importlib.util.find_spec(needs) is None:
        return {"skipped": f"{needs} is not installed"}
    if torch.cuda.device_count() < gpus and (gpus > 1 or needs or not quick):
        return {"skipped": f"needs {gpus} GPU{'s' * (gpus > 1)}"}
    words = ["--measure", name, *["--quick"] * quick]
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:gpus]
    options = {"processes": gpus, "CUDA_VISIBLE_DEVICES": ",".join(devices)}
    found = launch("gpu.py", *words, seconds=seconds, **options)
    return {"skipped": "out of memory"} if found.get("error") == "out of memory" else found


def main() -> None:
    """Measure all rows, or print one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny models, also on a CPU")
    parser.add_argument("--only", nargs="+", choices=ROWS, help="rows; all of them")
    parser.add_argument("--seconds", type=float, default=240, help="most seconds of one row")
    parser.add_argument("--measure", choices=ROWS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        spec = ROWS[options.measure]
        spec |= {"model": "tiny", "tokens": 80} if options.quick else {}
        found = (sampling if spec["method"] == "sample" else training)(spec)
        if os.environ.get("RANK", "0") == "0":
            send(found)
        return
    figures: dict[str, Any] = {"torch": torch.__version__, "rows": {}}
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        figures |= {"device": card.name, "memory_gib": card.total_memory / GIB}
    for name in options.only or (["lora-2k", "sampler"] if options.quick else ROWS):
        figures["rows"][name] = row(name, options.quick, options.seconds)
        print(f"{name}: {figures['rows'][name]}", file=sys.stderr, flush=True)
    finish(figures)


if __name__ == "__main__":
    main()
