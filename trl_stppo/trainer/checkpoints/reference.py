"""Marks by which a checkpoint knows the reference policy of its run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from ...errors import CheckpointError
from ...models.adapters import REFERENCE
from ..bridge import Bridge
from ..sharding.runtime import is_in_pieces

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
    """Refuse a checkpoint of a run with another reference policy, or with the same in another dtype."""
    if was is None or now is None or was == now:
        return
    name = next(name for name in (*was, *now) if was.get(name) != now.get(name))
    dtypes = [marks[name][0] if name in marks else "missing" for marks in (was, now)]
    raise CheckpointError(
        f"`{folder}` comes from a run with another reference policy: they differ in {name!r} "
        f"({dtypes[0]}, now {dtypes[1]}). Pass the `model` (or `ref_model`) that the run began with, in the "
        f"same dtype; its policy comes from the checkpoint."
    )
