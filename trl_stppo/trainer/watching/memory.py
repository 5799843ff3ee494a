"""What a run needs of its card: read into `models.memory`, which adds up, and said before it starts.

Models are read by `models.shapes`, settings and engine here, of a trainer as of a run that is only
planned. An estimate must never stop a run, so `announce` swallows whatever goes wrong here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import TrainerCallback

from ...models.memory import FITS, GIB, TILE_TOKENS, Setup, estimate, make_qlora
from ...models.shapes import modules_size, read_setup
from ...watch.lines import say, wrapped
from .._trl import TORCH_TILE_TOKENS
from ..host import Host
from ..setup.plan import RolloutPlan
from ..sharding.runtime import sharding_name

logger = logging.getLogger(__name__)
# Parameters up to which a second thread of a CPU costs more than it brings.
FEW_PARAMETERS = 20_000_000
# Rows of the dataset that are tokenised to find the longest prompt.
SAMPLED_ROWS = 16


class MemoryCallback(TrainerCallback):
    """Says at the start what the run will take of the card.

    Args:
        host: whose callback it is, where whoever estimates finds the rest.
        rollout: who plays its episodes.
        scorers: of turns, models among them.
    """

    def __init__(self, host: Host, rollout: RolloutPlan, scorers: Sequence[Any]) -> None:
        self._host, self.rollout, self.scorers = host, rollout, scorers

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print the estimate, and hints where it is more than there is."""
        announce(self._host)


def announce(trainer: Host) -> None:
    """Print what the run will take, and what to change where that is too much."""
    try:
        if not trainer.accelerator.is_main_process:
            return
        device = trainer.accelerator.device
        if device.type == "cpu":
            warn_of_threads(trainer.model)
        found = capacity(device)
        if found is None:
            return
        setup = setup_of(trainer, card=found[0])
        for line in report(setup, *found):
            say("\n".join(wrapped(line)))
    except Exception:
        logger.debug("The memory of this run could not be estimated.", exc_info=True)


def warn_of_threads(model: Any) -> None:
    """Propose one thread for a small model, unless somebody has thought of it."""
    threads, small = torch.get_num_threads(), model.num_parameters() <= FEW_PARAMETERS
    if threads > 1 and small and "OMP_NUM_THREADS" not in os.environ:
        said = (
            f"threads: {threads}; for a model this small one is faster, several times so on a busy "
        )
        say("\n".join(wrapped(f"{said}machine: export OMP_NUM_THREADS=1")))


def report(setup: Setup, size: int, name: str) -> list[str]:
    """The lines to print.

    Args:
        setup: of the run.
        size: bytes that there are.
        name: of what has them.
    """
    expected = estimate(setup)
    parts = expected.parts(expected.phase)
    where = expected.phase if expected.phase == "scoring" else f"the {expected.phase}"
    lines = [
        f"memory: about {expected.peak / GIB:.1f} GiB at the peak of {where} ({parts}) "
        f"of {size / GIB:.1f} GiB on {name}"
    ]
    if expected.peak <= FITS * size:
        return lines
    proposals = [f"{text} (saves {saved / GIB:.1f} GiB)" for text, saved in hints(setup)]
    lines.append(
        "memory: WARNING: this will probably not fit. "
        + (f"Try: {'; '.join(proposals)}." if proposals else "A smaller model is needed.")
    )
    return lines


def hints(setup: Setup) -> list[tuple[str, int]]:
    """What would take less memory, the most effective first, with the bytes that each saves."""
    now = estimate(setup).peak
    options = [(text, now - estimate(other).peak) for text, other in _alternatives(setup)]
    return sorted((o for o in options if o[1] > 0.01 * now), key=lambda option: -option[1])


def _alternatives(setup: Setup) -> Iterable[tuple[str, Setup]]:
    if setup.rows > 1:
        smaller = replace(setup, rows=1, scoring_rows=min(1, setup.scoring_rows), accumulates=True)
        text = "per_device_train_batch_size=1 with gradient_accumulation_steps times"
        yield f"{text} {setup.rows}", smaller
    if not setup.checkpointing:
        yield "gradient_checkpointing=True", replace(setup, checkpointing=True)
    if not setup.four_bit:
        own = ", critic on the same backbone" if setup.critic_weights else ""
        yield f"QLoRA: load_in_4bit with LoRA{own}", make_qlora(setup)
    if setup.completion >= 512:
        half = setup.completion // 2
        yield f"max_completion_length={half}", replace(setup, completion=half)
    if setup.device == "cuda" and not setup.optim.startswith("paged"):
        yield "optim=paged_adamw_8bit", replace(setup, optim="paged_adamw_8bit")
    if setup.slots > 1 and setup.slots_settable:
        half = setup.slots // 2
        yield f"generation_slots={half}", replace(setup, slots=half)


# ----------------------------------------------------------------------- reading


def setup_of(trainer: Host, card: int = 0) -> Setup:
    """The trainer's models and settings, as the memory model takes them.

    Args:
        trainer: built.
        card: bytes of the accelerator, of which a colocated vLLM reserves a share.

    Raises:
        ValueError: the policy's or the critic's shape is not known.
    """
    callbacks = trainer.callback_handler.callbacks
    (own,) = (callback for callback in callbacks if isinstance(callback, MemoryCallback))
    args, on_cuda = trainer.args, trainer.accelerator.device.type == "cuda"
    settings = settings_of(args, longest_prompt(trainer.train_dataset, trainer.processing_class))
    if trainer.use_vllm or own.rollout.user_func is not None:  # others play the episodes
        settings["slots"] = 0
    colocated = trainer.use_vllm and trainer.vllm_mode == "colocate"
    setup = read_setup(
        trainer.model,
        trainer.critic,
        trainer.ref_model,
        **settings,
        slots_settable=own.rollout.uses_engine,
        device="cuda" if on_cuda else "cpu",
        tile_tokens=TILE_TOKENS if on_cuda else TORCH_TILE_TOKENS,
        other=modules_size([*trainer.reward_funcs, *own.scorers]),
        sampler=round(args.vllm_gpu_memory_utilization * card) if colocated else 0,
        sampler_sleeps=bool(args.vllm_enable_sleep_mode),
    )
    return shared_out(setup, sharding_name(trainer.accelerator), trainer.accelerator.num_processes)


def settings_of(args: Any, prompt: int = 0) -> dict[str, Any]:
    """The fields of `Setup` that a configuration sets; the length of the longest prompt is given."""
    batch = args.per_device_train_batch_size * (args.steps_per_generation or 1)
    exact = getattr(args, "takes_second_gradient", False)
    extra = args.entropy_coef != 0.0 or args.beta != 0.0
    return {
        "rows": args.per_device_train_batch_size,
        "prompt": prompt,
        "completion": args.max_completion_length,
        "accumulates": args.gradient_accumulation_steps > 1,
        "checkpointing": args.gradient_checkpointing,
        "optim": str(getattr(args.optim, "value", args.optim)),
        "bias_buffers": (2 if extra else 1) if exact else 0,
        "slots": 0 if args.use_vllm else min(batch, args.generation_slots or batch),
        "scoring_rows": args.local_rollout_forward_batch_size or 0,
        **({"compute_bytes": 2} if args.bf16 else {}),
    }


def shared_out(setup: Setup, engine: str, processes: int) -> Setup:
    """The same run on one of several processes.

    What an engine saves is reckoned in the plainest way: what it shares out is divided by the number of
    processes, what it gathers for a rollout is counted whole there, and its buffers are left out. DDP
    adds the buckets in which it reduces gradients.
    """
    trained, n = setup.trainable, processes
    if not engine.startswith(("ZeRO", "FSDP")):
        buckets = trained * setup.trainable_bytes if n > 1 else 0
        return replace(setup, other=setup.other + buckets)
    setup = _critic_shared_out(setup, engine, n)
    if not setup.full:  # adapters are small; frozen weights are shared out by two of them
        if engine not in ("ZeRO-3", "FSDP2"):
            return replace(setup, bias_buffers=0)
        gathered = setup.weights
        return _gathering(replace(setup, bias_buffers=0, weights=gathered // n), gathered)
    if engine == "FSDP2":
        weights, reference = setup.weights // n, setup.reference_weights // n
        gathered = setup.weights * setup.compute_bytes // setup.weight_bytes  # in bfloat16, if that
    else:
        half = 2 * trained  # of float32 masters
        weights = _of_zero(trained, engine, n)
        gathered = half if engine == "ZeRO-3" else 0
        reference = weights - 4 * trained // n if setup.reference_weights else 0
    unreduced = 2 * trained if engine == "ZeRO-1" else 0
    setup = replace(
        setup,
        weights=weights,
        reference_weights=reference,
        trainable=trained // n,
        trainable_bytes=4,  # both step masters in float32
        bias_buffers=0,
        other=setup.other + unreduced,
        weight_bytes=setup.weight_bytes if engine == "FSDP2" else 2,
    )
    return _gathering(setup, gathered)


def _critic_shared_out(setup: Setup, engine: str, processes: int) -> Setup:
    """What is left of the critic; ZeRO shares out one of its own alone."""
    weights, trained = setup.critic_weights, setup.critic_trainable
    pieces, other = weights // processes, setup.other
    if engine != "FSDP2" and not setup.critic_full:
        return replace(setup, critic_weights=pieces if engine == "ZeRO-3" else weights)
    if engine != "FSDP2":
        pieces = _of_zero(trained, engine, processes)
        other += 2 * trained if engine == "ZeRO-1" else 0  # before it is reduced
    return replace(setup, critic_weights=pieces, critic_trainable=trained // processes, other=other)


def _of_zero(trained: int, engine: str, processes: int) -> int:
    """Bytes of weights: bfloat16 ones, with which is computed, and float32 ones, which are stepped."""
    half, masters = 2 * trained, 4 * trained // processes
    return (half // processes if engine == "ZeRO-3" else half) + masters


def _gathering(setup: Setup, weights: int) -> Setup:
    """With so many bytes more in a rollout, if the policy plays it."""
    if not (weights and setup.slots):
        return setup
    return replace(setup, sampler=setup.sampler + weights, sampler_sleeps=True)


def longest_prompt(rows: Any, tokenizer: Any) -> int:
    """Tokens of the longest prompt among a few rows; 0 where they cannot be had cheaply."""
    try:
        few = rows.select(range(min(SAMPLED_ROWS, len(rows))))
        return max(_prompt_length(row, tokenizer) for row in few)
    except Exception:
        return 0


def _prompt_length(row: dict[str, Any], tokenizer: Any) -> int:
    if "input_ids" in row:
        return len(row["input_ids"])
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


# ------------------------------------------------------------------- what there is


def capacity(device: torch.device) -> tuple[int, str] | None:
    """Bytes that the run can use, and of what; None if that is not known."""
    import psutil

    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        return card.total_memory, card.name
    if device.type == "cpu":  # what is available, and what this process holds already
        own = psutil.Process().memory_info().rss
        return psutil.virtual_memory().available + own, "this machine's RAM"
    return None
