"""The mini-batches that guards have kept from the weights, written down for whoever looks into it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..host import Host, Upstream
from ..loop.batch import Batch

logger = logging.getLogger(__name__)

FOLDER = "skipped"
# Per process and run: the first ones tell what began it, and a run of weeks must not fill the disk.
MAX_FILES = 10


def non_finite_names(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Parameters whose gradient, as it lies there now, is not finite."""
    return [n for n, p in parameters if p.grad is not None and not bool(p.grad.isfinite().all())]


def save(host: Host, upstream: Upstream, micro_batches: list[Batch], about: dict[str, Any]) -> None:
    """Write this process's part of a mini-batch to `output_dir/skipped/step-<n>-rank<r>.pt`.

    Plain tensors, lists, strings and numbers, so that `torch.load(path, weights_only=True)` reads it. A
    full disk costs the file, not the run.

    Args:
        host: whose mini-batch it is.
        upstream: knows the tokenizer.
        micro_batches: with padding, as they were cut from the rollout batch.
        about: what else to write, plain data too.
    """
    step, rank = host.state.global_step + 1, host.accelerator.process_index
    path = Path(host.args.output_dir) / FOLDER / f"step-{step}-rank{rank}.pt"
    content = {
        "step": step,
        "process_index": rank,
        **about,
        "micro_batches": [_plain(batch) for batch in micro_batches],
        "texts": [_texts(upstream.tokenizer, batch) for batch in micro_batches],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as the latter
        logger.warning("The skipped mini-batch could not be written to %s: %s", path, error)


def _plain(batch: Batch) -> dict[str, Any]:
    """Copies on the CPU: a slice would take the whole rollout batch along."""
    return {
        key: value.detach().cpu().clone() if isinstance(value, Tensor) else value
        for key, value in batch.items()
        if isinstance(value, Tensor | int | float | str) or value is None
    }


def _texts(tokenizer: Any, batch: Batch) -> list[dict[str, str]]:
    def decode(part: str) -> list[str]:
        tensors: dict[str, Any] = dict(batch)
        pairs = zip(tensors[f"{part}_ids"], tensors[f"{part}_mask"].bool(), strict=True)
        texts: list[str] = tokenizer.batch_decode([ids[mask] for ids, mask in pairs])
        return texts

    prompts, completions = decode("prompt"), decode("completion")
    return [{"prompt": p, "completion": c} for p, c in zip(prompts, completions, strict=True)]
