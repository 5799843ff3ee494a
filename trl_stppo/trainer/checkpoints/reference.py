"""Marks by which a checkpoint knows the reference policy of its run again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ...errors import CheckpointError
from ...models.adapters import REFERENCE
from ..bridge import Bridge
from ..sharding.runtime import is_in_pieces

logger = logging.getLogger(__name__)
# Name of a tensor -> its dtype, its shape and some of its values.
Marks: TypeAlias = dict[str, list[Any]]
# Number of values of each tensor.
VALUES = 4


def marks_of(host: Bridge) -> Marks | None:
    """Return the marks of a run's reference policy, or None without a KL.

    A checkpoint holds a reference that `sync_ref_model` moves, and a reference adapter. Quantised weights and
    shards have no values to compare.
    """
    args = host.args
    if args.kl_coef == 0.0 and args.beta == 0.0:
        return None
    if args.sync_ref_model:
        return {"sync_ref_model": ["", [], []]}
    # If there is no reference model, the policy without its trained adapters is the reference.
    shared = host.ref_model is None
    model = host.accelerator.unwrap_model(host.model if shared else host.ref_model, keep_torch_compile=False)
    named = [(n, p) for n, p in model.named_parameters() if not (shared and p.requires_grad)]
    marks = {}
    for name, weight in named:
        known = weight.is_floating_point() and REFERENCE not in name.split(".")
        values: list[float] = []
        if known and not is_in_pieces(weight):
            few = weight.detach().flatten()[:: 1 + weight.numel() // VALUES]
            values = few.double().tolist()
        shape = [*getattr(weight, "ds_shape", weight.shape)]
        marks[name] = [str(weight.dtype).removeprefix("torch."), shape, values]
    return marks


def check_reference(folder: Path, was: Marks | None, now: Marks | None) -> None:
    """Refuse a checkpoint of a run with another reference policy; warn of another dtype."""
    if was is None or now is None:
        return
    pairs = {name: (was.get(name), now.get(name)) for name in (*was, *now)}
    if other := next((name for name, pair in pairs.items() if not _same(*pair)), None):
        raise CheckpointError(
            f"`{folder}` comes from a run with another reference policy: they differ in {other!r}. Pass the "
            f"`model` (or `ref_model`) that the run began with; its policy comes from the checkpoint."
        )
    if was != now:
        logger.warning("%s: the reference policy has another dtype, so its KL is rounded.", folder)


def _same(was: list[Any] | None, now: list[Any] | None) -> bool:
    """Return whether tensors with these marks are equal, except for the rounding of their dtypes."""
    if was is None or now is None or was[1] != now[1]:
        return False
    if not was[2] or not now[2]:
        return True
    # Other dtypes have rounded the values by at most half of bfloat16's spacing each.
    rounding = 0.0 if was[0] == now[0] else 2**-7
    return np.allclose(was[2], now[2], rtol=rounding, atol=2**-24 * bool(rounding))
