"""Weights and optimizers in pieces: gathered, cut, saved and loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.integrations import deepspeed as hf_deepspeed

from ..step import GradientBuffer

CRITIC_OPTIMIZER = "critic_optimizer.pt"


@dataclasses.dataclass(eq=False)
class CriticOptimizer:
    """Separate optimizer of a critic, which steps with the reduced and clipped gradient in `buffer`."""

    optimizer: torch.optim.Optimizer
    buffer: GradientBuffer
    rate: Callable[[], float | Tensor]

    def step(self) -> None:
        """Take an optimizer step with the buffered gradient and clear the buffer; skip an empty buffer."""
        if self.buffer.is_empty:
            return
        self.buffer.add_to_grad()
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.buffer.clear()

    def save(self, folder: Path, *, writes: bool) -> None:
        """Save the optimizer's state to a checkpoint; all processes must call this, and one writes."""
        state = self.optimizer.state_dict()
        moments = {i: {k: whole(v, writes) for k, v in kept.items()} for i, kept in state["state"].items()}
        if writes:
            torch.save({**state, "state": moments}, folder / CRITIC_OPTIMIZER)

    def load(self, folder: Path) -> None:
        """Restore the optimizer's state from a checkpoint, sharded like the parameters."""
        path = folder / CRITIC_OPTIMIZER
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        ids, parameters = (
            [one for group in groups for one in group["params"]]
            for groups in (state["param_groups"], self.optimizer.param_groups)
        )
        own = dict(zip(ids, parameters, strict=True))
        moments = {i: {k: cut(v, own[i]) for k, v in kept.items()} for i, kept in state["state"].items()}
        self.optimizer.load_state_dict({**state, "state": moments})


def is_in_pieces(value: object) -> bool:
    """Return whether this process holds a shard of a tensor (FSDP2, ZeRO-3)."""
    return isinstance(value, DTensor) or hasattr(value, "ds_id")


def whole(value: Any, keep: bool) -> Any:
    """Gather a sharded tensor on all processes together; return it in main memory if `keep`, else None."""
    if not is_in_pieces(value):
        return value
    with gathered([value]):
        full = value.full_tensor() if isinstance(value, DTensor) else value
        return full.detach().cpu() if keep else None


def gathered(parameters: Sequence[Tensor], writer: int | None = None) -> AbstractContextManager[None]:
    """Context manager that gathers ZeRO-3's parameters; it keeps only changes by the process `writer`."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=writer)


def cut(value: Any, like: Any) -> Any:
    """Shard a full tensor as `like` is sharded, if their shapes match; return other values unchanged."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


def keep_precision(accelerator: Accelerator) -> None:
    """Let FSDP2 compute in bfloat16, but keep gradient sums and log-probabilities in float32."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    policy = getattr(plugin, "mixed_precision_policy", None)
    if plugin is not None and policy is not None and policy.param_dtype == torch.bfloat16:
        plugin.mixed_precision_policy = dataclasses.replace(
            policy, reduce_dtype=torch.float32, output_dtype=torch.float32
        )


def pass_over_empty_steps(engine: Any) -> None:
    """Skip DeepSpeed's backward pass if the loss has no graph, as in a warm-up."""
    backward = engine.backward

    def backward_if_any(loss: Tensor, *args: object, **kwargs: object) -> None:
        if loss.grad_fn is not None:
            backward(loss, *args, **kwargs)

    engine.backward = backward_if_any


@contextmanager
def whole_weights(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Context manager that keeps FSDP2's weights gathered, so that each process can call the model freely."""
    if not isinstance(model, FSDPModule):
        yield
        return
    root: Any = model
    units = [module for module in root.modules() if isinstance(module, FSDPModule)]
    root.set_reshard_after_forward(False)
    for unit in units:
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
        # Restore accelerate's setting, but let root and head stay gathered after a forward pass, because the
        # backward pass begins there.
        root.set_reshard_after_forward(bool(accelerator.state.fsdp_plugin.reshard_after_forward))
        root.set_reshard_after_forward(False, recurse=False)
        head = root.get_output_embeddings()
        if isinstance(head, FSDPModule):
            head.set_reshard_after_forward(False, recurse=False)


@contextmanager
def unpartitioned() -> Iterator[None]:
    """Context manager in which transformers loads full models, also under ZeRO-3."""
    reference = hf_deepspeed._hf_deepspeed_config_weak_ref
    config = None if reference is None else reference()
    hf_deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if config is not None:
            hf_deepspeed.set_hf_deepspeed_config(config)
