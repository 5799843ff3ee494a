"""Check that a checkpoint belongs to the same run, by its manifest."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ..bridge import Bridge
from ..describe import adapter_of, algorithm_settings, critic_of
from ..sharding.runtime import is_sharded, sharding_name

logger = logging.getLogger(__name__)

# Must be equal: else the data differ, or weights and moments do not fit.
FIXED = (
    *("trainer", "variant", "critic", "adapter", "engine", "rows", "seed", "shuffle"),
    *("batch", "episodes_per_prompt", "epochs", "mini_batches"),
)
# May differ only at the start of a rollout: the buffer is cut by processes and micro-batches.
CUT = ("processes", "micro_batches")


def about(host: Bridge, name: str, *, inside_rollout: bool) -> dict[str, Any]:
    """Return a record of the run for the manifest: identity, split into batches, settings."""
    args, accelerator, rows = host.args, host.accelerator, host.train_dataset
    micro_batches = args.steps_per_generation
    assert micro_batches is not None
    return {
        "run": name,
        "global_step": host.state.global_step,
        "inside_rollout": inside_rollout,
        "resumable": not args.save_only_model,
        "identity": {
            "trainer": host.config_class.__name__,
            "variant": getattr(args, "variant", None),
            "critic": critic_of(host),
            "adapter": adapter_of(accelerator.unwrap_model(host.model)),
            "engine": sharding_name(accelerator) if is_sharded(accelerator) else None,
            "rows": len(rows) if hasattr(rows, "__len__") else None,
            "seed": args.seed,
            "shuffle": bool(args.shuffle_dataset),
            "batch": args.generation_batch_size,
            "episodes_per_prompt": host.num_generations,
            "epochs": host.num_iterations,
            "mini_batches": micro_batches // args.gradient_accumulation_steps,
        },
        "cut": {"processes": accelerator.num_processes, "micro_batches": micro_batches},
        "settings": algorithm_settings(args),
    }


def check_same_run(folder: Path, saved: dict[str, Any], present: dict[str, Any]) -> None:
    """Refuse a checkpoint that cannot be resumed from; warn if its batches will be split differently."""
    if not saved["resumable"]:
        raise CheckpointError(
            f"`{folder}` was written with save_only_model=True and has no optimizer state."
        )
    for field in FIXED:
        was, now = saved["identity"].get(field), present["identity"][field]
        if was != now:
            raise CheckpointError(
                f"`{folder}` comes from a run with {field}={was!r}; this one has {field}={now!r}."
            )
    trained_by = saved["identity"].get("engine") or ""
    for field in CUT:
        was, now = saved["cut"].get(field), present["cut"][field]
        if was != now and field == "processes" and trained_by.startswith("ZeRO"):
            raise CheckpointError(
                f"`{folder}` comes from {was} processes; this run has {now}, and {trained_by} needs as many."
            )
        if was != now and saved["inside_rollout"]:
            raise CheckpointError(
                f"`{folder}`: in the middle of a rollout with {field}={was!r}; this run has {field}={now!r}."
            )
        if was != now:
            logger.warning(
                "%s: %s was %r and is %r now, so the run will not equal the uninterrupted one bit for bit.",
                folder, field, was, now,
            )  # fmt: skip
