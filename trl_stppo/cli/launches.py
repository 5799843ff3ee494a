"""How a run would be launched, read without launching it; for dry runs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import TrainingArguments

from .early import TRUE, peeked
from .launch import launch_settings

PLAIN = {"NO": "none", "MULTI_GPU": "DDP", "MULTI_CPU": "DDP"}
# Flags of accelerate's launcher that choose the kind.
KINDS = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "multi_gpu": "MULTI_GPU", "cpu": "NO"}
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
        options: DeepSpeed's configuration, or FSDP's options by accelerate's names.
        pretended: read from a file, for a machine that may be another one.
    """

    engine: str = "none"
    processes: int = 1
    mixed_precision: str = "no"
    options: dict[str, Any] = field(default_factory=dict)
    pretended: bool = False

    def accelerator(self) -> Any:
        """As much of an accelerator as the checks of engines look at."""
        deepspeed = fsdp = None
        if self.engine.startswith("ZeRO"):
            deepspeed = SimpleNamespace(
                zero_stage=int(self.engine[-1]), deepspeed_config=self.options
            )
        if self.engine.startswith("FSDP"):
            version = int(self.engine[-1])
            default = "FULL_STATE_DICT" if version == 1 else "SHARDED_STATE_DICT"
            kind = self.options.get("fsdp_state_dict_type")
            fsdp = SimpleNamespace(
                fsdp_version=version,
                cpu_offload=CPUOffloadPolicy() if self._asks("fsdp_offload_params") else None,
                cpu_ram_efficient_loading=self._asks("fsdp_cpu_ram_efficient_loading"),
                activation_checkpointing=self._asks("fsdp_activation_checkpointing"),
                state_dict_type=default if kind is None else kind,
            )
        state = SimpleNamespace(deepspeed_plugin=deepspeed, fsdp_plugin=fsdp)
        return SimpleNamespace(state=state, num_processes=self.processes, parallelism_config=None)

    def _asks(self, option: str) -> bool:
        return str(self.options.get(option)).lower() in TRUE


def launcher(words: Sequence[str], launch_words: Sequence[str] = ()) -> Launch:
    """How the run is started: from the flags, or what accelerate has set.

    Args:
        words: flags of the command.
        launch_words: flags for accelerate's launcher.

    Raises:
        ValueError: a file or number that says nothing.
    """
    given = launch_settings(launch_words)
    named, asked = given.pop("config_file", None), peeked(words, "dry_run_accelerate_config", None)
    number = peeked(words, "dry_run_processes", None)
    if asked is not None:
        launch = _from_settings(*_read(f"`dry_run_accelerate_config={asked}`", asked), given)
    elif named is not None:
        launch = _from_settings(*_read(f"`accelerate_config={named}`", named), given)
    elif given:
        launch = _from_settings({"distributed_type": "NO"}, "the command line", given)
    else:
        launch = _from_environment()
    if number is not None:
        launch = replace(launch, processes=_count(number, f"`dry_run_processes={number}`"))
    several = launch.engine == "none" and launch.processes > 1
    return replace(launch, engine="DDP") if several else launch


def _count(value: Any, said: str) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise ValueError(f"{said}: must be a whole number of at least 1.")
    return number


def _from_environment() -> Launch:
    env = os.environ
    precision = env.get("ACCELERATE_MIXED_PRECISION", "no")
    launch = Launch(processes=int(env.get("WORLD_SIZE", 1)), mixed_precision=precision)
    if env.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        prefix = "ACCELERATE_DEEPSPEED_"
        given: dict[str, Any] = {}
        given |= {k.removeprefix(prefix).lower(): v for k, v in env.items() if k.startswith(prefix)}
        given["deepspeed_config_file"] = given.get("config_file")
        return _with_deepspeed(launch, given)
    if env.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        options = {k.lower(): v for k, v in env.items() if k.startswith("FSDP_")}
        return replace(launch, engine=f"FSDP{options.get('fsdp_version', 1)}", options=options)
    return launch


def _read(said: str, path: str) -> tuple[dict[str, Any], str]:
    """What a file for accelerate holds, and the file."""
    if not Path(path).exists():
        raise ValueError(
            f"{said} does not exist; `trl-stppo train` knows some by name (docs/cli.md)."
        )
    read = yaml.safe_load(Path(path).read_text())
    if not isinstance(read, dict):
        raise ValueError(f"{said} holds no settings; write it as `accelerate config` does.")
    return read, str(path)


def _from_settings(read: dict[str, Any], source: str, given: Mapping[str, Any]) -> Launch:
    """The launch that a file describes, changed by flags for accelerate's launcher."""
    read = _changed(read, given)
    number, kind = read.get("num_processes", 1), str(read.get("distributed_type"))
    launch = Launch(
        processes=_count(number, f"`num_processes: {number}` in {source}"),
        mixed_precision=str(read.get("mixed_precision") or "no").lower(),
        pretended=True,
    )
    if kind == "DEEPSPEED":
        return _with_deepspeed(launch, read.get("deepspeed_config") or {})
    if kind == "FSDP":
        given = read.get("fsdp_config") or {}
        options = {f"fsdp_{k.removeprefix('fsdp_')}": v for k, v in given.items()}
        return replace(launch, engine=f"FSDP{options.get('fsdp_version', 1)}", options=options)
    if kind not in PLAIN:
        raise ValueError(
            f"`distributed_type={kind}` in {source}: known are DEEPSPEED, FSDP, {', '.join(PLAIN)}."
        )
    return replace(launch, engine=PLAIN[kind])


def _changed(read: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A file's settings with flags of accelerate's launcher in their places."""
    changed = dict(read)
    for name, value in given.items():
        if name in KINDS:
            changed["distributed_type"] = KINDS[name] if value else changed.get("distributed_type")
        elif name.startswith("fsdp_"):
            changed["fsdp_config"] = {**(changed.get("fsdp_config") or {}), name: value}
        elif name.startswith(("zero", "offload_", "deepspeed_", "gradient_")):
            changed["deepspeed_config"] = {**(changed.get("deepspeed_config") or {}), name: value}
        else:
            changed[name] = value
    return changed


def _with_deepspeed(launch: Launch, given: Mapping[str, Any]) -> Launch:
    """DeepSpeed's own configuration, where accelerate's options fill in what it leaves open."""
    config: dict[str, Any] = {"zero_optimization": {}}
    path = given.get("deepspeed_config_file")
    if path not in (None, "none"):
        config = _deepspeed_file(Path(str(path)))
    zero = dict(config["zero_optimization"])
    if zero.get("stage") in (None, "auto"):
        stage = given.get("zero_stage")
        zero["stage"] = 2 if stage is None else stage
    for name in ("offload_optimizer", "offload_param"):
        part = dict(zero.get(name) or {})
        if part.get("device") in (None, "auto"):
            part["device"] = str(given.get(f"{name}_device") or "none").lower()
        zero[name] = part
    options = {**config, "zero_optimization": zero}
    return replace(launch, engine=f"ZeRO-{zero['stage']}", options=options)


def _deepspeed_file(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
        problem = "has no section zero_optimization"
    except (OSError, ValueError) as error:
        config, problem = None, f"cannot be read ({error})"
    if not isinstance(config, dict) or not isinstance(config.get("zero_optimization"), dict):
        raise ValueError(
            f"`deepspeed_config_file={path}` {problem}. Name a JSON file of DeepSpeed's, or set zero_stage "
            f"instead."
        )
    return config


@contextmanager
def launched_as(launch: Launch) -> Iterator[None]:
    """Let configurations believe that they were launched so, and by no launcher that waits for others."""
    hidden = {name: os.environ.pop(name) for name in HIDDEN if name in os.environ}
    size = TrainingArguments.world_size
    TrainingArguments.world_size = property(lambda self: launch.processes)
    os.environ["ACCELERATE_MIXED_PRECISION"] = launch.mixed_precision
    try:
        yield
    finally:
        TrainingArguments.world_size = size
        del os.environ["ACCELERATE_MIXED_PRECISION"]
        os.environ.update(hidden)
