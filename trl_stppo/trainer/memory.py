"""What a built trainer will need of its card, said once before it starts.

Reads the weights that are loaded and the settings into `models.memory`; that adds up. An estimate must
never stop a run, so `announce` swallows whatever goes wrong here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..models.critic import SeparateCritic
from ..models.geometry import Geometry, geometry_of
from ..models.memory import FITS, GIB, TILE_TOKENS, Estimate, Setup, estimate, make_qlora
from ._trl import TORCH_TILE_TOKENS

if TYPE_CHECKING:
    from .ppo_trainer import PPOTrainer

logger = logging.getLogger(__name__)
# Parameters up to which a second thread of a CPU costs more than it brings.
FEW_PARAMETERS = 20_000_000
# Rows of the dataset that are tokenised to find the longest prompt.
SAMPLED_ROWS = 16


def announce(trainer: PPOTrainer) -> None:
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
            print(line, flush=True)
    except Exception:
        logger.debug("The memory of this run could not be estimated.", exc_info=True)


def warn_of_threads(model: Any) -> None:
    """Propose one thread for a small model, unless somebody has thought of it."""
    threads, small = torch.get_num_threads(), model.num_parameters() <= FEW_PARAMETERS
    if threads > 1 and small and "OMP_NUM_THREADS" not in os.environ:
        print(
            f"threads: {threads}; for a model this small one is faster, several times so on a busy "
            "machine: export OMP_NUM_THREADS=1",
            flush=True,
        )


def estimate_of(trainer: PPOTrainer) -> Estimate | None:
    """What the trainer's run will take, None where its models' family is not known."""
    try:
        return estimate(setup_of(trainer))
    except ValueError as error:
        logger.debug("%s", error)
        return None


def report(setup: Setup, size: int, name: str) -> list[str]:
    """The lines to print.

    Args:
        setup: of the run.
        size: bytes that there are.
        name: of what has them.
    """
    expected = estimate(setup)
    order = sorted(expected.parts.items(), key=lambda part: -part[1])
    parts = ", ".join(f"{k} {v / GIB:.1f}" for k, v in order if v / GIB >= 0.05)
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


# ---------------------------------------------------------------- reading a trainer


def setup_of(trainer: PPOTrainer, card: int = 0) -> Setup:
    """The trainer's models and settings, as the memory model takes them.

    Args:
        trainer: built.
        card: bytes of the accelerator, of which a colocated vLLM reserves a share.

    Raises:
        ValueError: the policy's or the critic's family is not known.
    """
    args, policy, critic = trainer.args, trainer.model, trainer.critic
    # A model of its own, None where the critic shares the policy's.
    own: Any = critic.model if isinstance(critic, SeparateCritic) else None
    of_critic = {id(p): p for p in critic.parameters()}
    trained = [p for p in policy.parameters() if p.requires_grad and id(p) not in of_critic]
    backbone, adapters = _split(policy)
    critic_backbone, critic_adapters = _split(own) if own is not None else ([], [])
    head = [p for p in of_critic.values() if own is None and not _inside(p, policy)]
    embedding = policy.get_input_embeddings().weight
    on_cuda = trainer.accelerator.device.type == "cuda"
    adapted = hasattr(policy, "peft_config")
    return Setup(
        geometry=_geometry(policy),
        weights=_size(backbone),
        trainable=sum(p.numel() for p in trained),
        critic_trainable=sum(p.numel() for p in of_critic.values()),
        adapters=_size([*adapters, *critic_adapters, *head]),
        critic_weights=_size(critic_backbone),
        reference_weights=_modules_size([trainer.ref_model]),
        critic_geometry=_geometry(own) if own is not None else None,
        full=not adapted,
        critic_full=own is not None and not hasattr(own, "peft_config"),
        four_bit=bool(getattr(policy, "is_loaded_in_4bit", False)),
        weight_bytes=embedding.element_size(),
        compute_bytes=2 if args.bf16 else embedding.element_size(),
        trainable_bytes=max((p.element_size() for p in trained), default=4),
        rows=args.per_device_train_batch_size,
        prompt=longest_prompt(trainer.train_dataset, trainer.processing_class),
        completion=args.max_completion_length,
        accumulates=args.gradient_accumulation_steps > 1,
        checkpointing=args.gradient_checkpointing,
        optim=str(getattr(args.optim, "value", args.optim)),
        bias_buffers=_bias_buffers(args),
        slots=_slots(trainer),
        slots_settable=trainer._rollout_plan.uses_engine,
        scoring_rows=args.local_rollout_forward_batch_size or 0,
        device="cuda" if on_cuda else "cpu",
        tile_tokens=TILE_TOKENS if on_cuda else TORCH_TILE_TOKENS,
        other=_others(trainer, trained),
        sampler=_sampler(trainer, card),
        sampler_sleeps=bool(args.vllm_enable_sleep_mode),
    )


def _bias_buffers(args: Any) -> int:
    if not getattr(args, "log_clip_bias", False):
        return 0
    return 2 if args.entropy_coef != 0.0 or args.beta != 0.0 else 1


def _slots(trainer: PPOTrainer) -> int:
    """Episodes that the training weights generate at the same time."""
    args = trainer.args
    plan = getattr(trainer, "_rollout_plan", None)
    if trainer.use_vllm or getattr(plan, "user_func", None) is not None:
        return 0
    batch = args.per_device_train_batch_size * (args.steps_per_generation or 1)
    return min(batch, args.generation_slots or batch)


def _others(trainer: PPOTrainer, trained: list[nn.Parameter]) -> int:
    """Reward models, and the buckets in which DDP reduces gradients."""
    scores = getattr(getattr(trainer, "_turn_reward_funcs", None), "funcs", None) or []
    total = _modules_size([*trainer.reward_funcs, *scores])
    if trainer.accelerator.num_processes > 1:
        total += _size(trained)
    return total


def _sampler(trainer: PPOTrainer, card: int) -> int:
    """What a colocated vLLM reserves."""
    colocated = trainer.use_vllm and trainer.vllm_mode == "colocate"
    return round(trainer.args.vllm_gpu_memory_utilization * card) if colocated else 0


def _geometry(model: Any) -> Geometry:
    return geometry_of(model.config.get_text_config())


def _split(model: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters of the backbone, and of the adapters on it."""
    adapters = set(getattr(model, "peft_config", {}))
    parts: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in model.named_parameters():
        parts[bool(adapters & set(name.split(".")))].append(parameter)
    return parts


def _inside(parameter: nn.Parameter, model: nn.Module) -> bool:
    return any(parameter is other for other in model.parameters())


def _size(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes, with the constants of what is quantised."""
    return sum(p.numel() * p.element_size() + _constants(p) for p in parameters)


def _constants(parameter: Any) -> int:
    """Bytes of the block constants that bitsandbytes keeps beside a packed weight."""
    total, state = 0, getattr(parameter, "quant_state", None)
    while state is not None:  # double quantisation has constants of the constants
        total += sum(
            t.numel() * t.element_size()
            for t in (state.absmax, state.code, getattr(state, "offset", None))
            if isinstance(t, torch.Tensor)
        )
        state = getattr(state, "state2", None)
    return total


def _modules_size(candidates: Iterable[Any]) -> int:
    return sum(_size(m.parameters()) for m in candidates if isinstance(m, nn.Module))


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
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        return card.total_memory, card.name
    if device.type == "cpu":
        return _ram()
    return None


def _ram() -> tuple[int, str] | None:
    """Memory that is available on Linux, what this process has already included."""
    info, own = Path("/proc/meminfo"), Path("/proc/self/status")
    if not info.exists():
        return None
    return _kilobytes(info, "MemAvailable") + _kilobytes(own, "VmRSS"), "this machine's RAM"


def _kilobytes(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"`{path}` has no {name}.")
