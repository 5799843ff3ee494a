"""How a run would be launched, read by accelerate's own functions without launching it; for dry runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from transformers import TrainingArguments

from .early import TRUE, peeked
from .launch import LAUNCHED, launch_arguments

# What launchers tell their processes; hidden, as nothing is to meet and no engine to be set up.
HIDDEN = (
    *("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION"),
)


@dataclass(frozen=True)
class Launch:
    """How accelerate would start the run.

    Attributes:
        engine: "none", "DDP", "ZeRO-0" to "ZeRO-3", "FSDP1" or "FSDP2".
        processes: number of them.
        mixed_precision: "no", "bf16", "fp16" or "fp8".
        plugin: accelerate's, of DeepSpeed or FSDP; None with neither.
        pretended: read from a file, for a machine that may be another one.
    """

    engine: str = "none"
    processes: int = 1
    mixed_precision: str = "no"
    plugin: Any = None
    pretended: bool = False


def launcher(words: Sequence[str], launch_words: Sequence[str] = ()) -> Launch:
    """How the run is started: from the flags, or what accelerate has set.

    Raises:
        ValueError: a file or number that says nothing.
    """
    asked = peeked(words, "dry_run_accelerate_config", None)
    number = peeked(words, "dry_run_processes", None)
    launch_words = [*launch_words, *([] if asked is None else ["--config_file", asked])]
    launch = _from_words(launch_words) if launch_words else _of_processes({}, os.environ)
    if number is not None:
        launch = replace(launch, processes=_count(number, f"`dry_run_processes={number}`"))
    several = launch.engine == "none" and launch.processes > 1
    return replace(launch, engine="DDP") if several else launch


def _count(value: Any, said: str) -> int:
    number = int(value) if str(value).isdecimal() else 0
    if number < 1:
        raise ValueError(f"{said}: must be a whole number of at least 1.")
    return number


def _from_words(words: Sequence[str]) -> Launch:
    """What the launcher would tell its processes, by its own reading of flags and files."""
    from accelerate.commands.launch import _validate_launch_command
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    told = launch_arguments(words, [LAUNCHED])
    source = told.config_file or "the command line"
    try:
        told, defaults, mixed = _validate_launch_command(told)
    except (AttributeError, TypeError) as error:  # an empty file, or no mapping
        raise ValueError(
            f"`{source}` holds no settings, as `accelerate config` writes them."
        ) from error
    if told.use_megatron_lm or told.tpu:
        kind = defaults.distributed_type.value if defaults else "XLA"
        raise ValueError(
            f"`distributed_type={kind}` in {source}: known are DEEPSPEED, FSDP, NO and MULTI_GPU."
        )
    number = told.num_processes or 1  # without a GPU accelerate counts none, and starts one
    number = _count(number, f"`num_processes: {number}` in {source}")
    added = {"ACCELERATE_MIXED_PRECISION": told.mixed_precision.lower(), "WORLD_SIZE": str(number)}
    told.main_process_port = 0  # a free one, as nothing is started
    if told.use_deepspeed and not told.cpu:
        from_file = [*(defaults.deepspeed_config if defaults else ()), *["mixed_precision"] * mixed]
        told.deepspeed_fields_from_accelerate_config = ",".join(from_file)
        added = prepare_deepspeed_cmd_env(told)[1] | added
    elif told.use_fsdp and not told.cpu:
        added = prepare_multi_gpu_env(told) | added
    launch = replace(_of_processes(added, added), pretended=True)
    return replace(launch, engine="DDP") if told.multi_gpu and launch.engine == "none" else launch


def _of_processes(added: Mapping[str, str], told: Mapping[str, str]) -> Launch:
    """The launch that processes find themselves in: variables that they are told, `added` to our own."""
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

    precision = told.get("ACCELERATE_MIXED_PRECISION", "no")
    launch = Launch(processes=int(told.get("WORLD_SIZE", 1)), mixed_precision=precision)
    with patch.dict(os.environ, added):
        if told.get("ACCELERATE_USE_DEEPSPEED", "").lower() in TRUE:
            plugin: Any = DeepSpeedPlugin()
            return replace(launch, engine=f"ZeRO-{plugin.zero_stage}", plugin=plugin)
        if told.get("ACCELERATE_USE_FSDP", "").lower() in TRUE:
            version = os.environ.get("FSDP_VERSION", "1")
            # The first version's asks for a GPU; what comes of it is refused whatever it says.
            plugin = FullyShardedDataParallelPlugin() if version == "2" else None
            return replace(launch, engine=f"FSDP{version}", plugin=plugin)
    return launch


@contextmanager
def launched_as(launch: Launch) -> Iterator[None]:
    """Let configurations believe that they were launched so, and by no launcher that waits for others."""
    size = property(lambda self: launch.processes)
    with patch.object(TrainingArguments, "world_size", size), patch.dict(os.environ):
        for name in HIDDEN:
            os.environ.pop(name, None)
        os.environ["ACCELERATE_MIXED_PRECISION"] = launch.mixed_precision
        yield
