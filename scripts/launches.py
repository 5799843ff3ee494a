"""How a run would be launched, read without launching it; for dry runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import TrainingArguments

from agents import peeked

PLAIN = {"NO": "none", "MULTI_GPU": "DDP", "MULTI_CPU": "DDP"}


@dataclass(frozen=True)
class Launch:
    """How accelerate would start the run.

    Attributes:
        engine: "none", "DDP", "ZeRO-0" to "ZeRO-3", "FSDP1" or "FSDP2".
        options: of the engine, from a file of accelerate's.
    """

    engine: str
    options: dict[str, Any] = field(default_factory=dict)

    def accelerator(self, processes: int) -> Any:
        """As much of an accelerator as the checks of engines look at."""
        deepspeed = fsdp = None
        if self.engine.startswith("ZeRO"):
            names = ("offload_optimizer", "offload_param")
            offloads = {n: {"device": self.options.get(f"{n}_device", "none")} for n in names}
            stage = int(self.engine[-1])
            config = {"zero_optimization": {"stage": stage, **offloads}}
            deepspeed = SimpleNamespace(zero_stage=stage, deepspeed_config=config)
        if self.engine.startswith("FSDP"):
            given = self.options.get
            fsdp = SimpleNamespace(
                fsdp_version=int(self.engine[-1]),
                cpu_offload=CPUOffloadPolicy() if given("fsdp_offload_params") else None,
                cpu_ram_efficient_loading=given("fsdp_cpu_ram_efficient_loading", False),
                activation_checkpointing=given("fsdp_activation_checkpointing", False),
                state_dict_type=given("fsdp_state_dict_type", "FULL_STATE_DICT"),
            )
        state = SimpleNamespace(deepspeed_plugin=deepspeed, fsdp_plugin=fsdp)
        return SimpleNamespace(state=state, num_processes=processes, parallelism_config=None)


def launcher(words: Sequence[str]) -> tuple[Launch, int]:
    """How the run is started, and on how many processes: from the flags, or what accelerate has set.

    Raises:
        ValueError: a file or number that says nothing.
    """
    number = peeked(words, "dry_run_processes", None)
    path = peeked(words, "dry_run_accelerate_config", None)
    launch, processes = _from_environment() if path is None else _from_file(Path(str(path)))
    if number is not None:
        try:
            processes = int(number)
        except ValueError:
            processes = 0
        if processes < 1:
            raise ValueError(f"`dry_run_processes={number}`: must be a whole number of at least 1.")
    if launch.engine == "none" and processes > 1:
        launch = Launch("DDP")
    return launch, processes


def _from_environment() -> tuple[Launch, int]:
    env = os.environ
    processes = int(env.get("WORLD_SIZE", 1))
    if env.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        return Launch(f"ZeRO-{env.get('ACCELERATE_DEEPSPEED_ZERO_STAGE', 2)}"), processes
    if env.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        return Launch(f"FSDP{env.get('FSDP_VERSION', 1)}"), processes
    return Launch("none"), processes


def _from_file(path: Path) -> tuple[Launch, int]:
    if not path.exists():
        raise ValueError(
            f"`dry_run_accelerate_config={path}` does not exist; scripts/accelerate_configs/ has some."
        )
    read = yaml.safe_load(path.read_text())
    kind, processes = str(read.get("distributed_type")), int(read.get("num_processes", 1))
    if kind == "DEEPSPEED":
        options = read.get("deepspeed_config") or {}
        return Launch(f"ZeRO-{options.get('zero_stage', 2)}", options), processes
    if kind == "FSDP":
        options = read.get("fsdp_config") or {}
        return Launch(f"FSDP{options.get('fsdp_version', 1)}", options), processes
    if kind not in PLAIN:
        raise ValueError(
            f"`distributed_type={kind}` in {path}: known are DEEPSPEED, FSDP, {', '.join(PLAIN)}."
        )
    return Launch(PLAIN[kind]), processes


@contextmanager
def pretended_processes(number: int) -> Iterator[None]:
    """Let configurations believe that there are so many processes."""
    kept = TrainingArguments.world_size
    TrainingArguments.world_size = property(lambda self: number)
    try:
        yield
    finally:
        TrainingArguments.world_size = kept


@contextmanager
def hidden_launcher() -> Iterator[None]:
    """Hide what a launcher tells its processes: nothing is to meet, and no engine to be set up."""
    names = [
        *("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
        *("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"),
    ]
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
