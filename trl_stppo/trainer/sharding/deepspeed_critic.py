"""A critic in a DeepSpeed engine of its own: sharded, stepped and saved like the policy.

The two engines share only the processes, so all processes make each pass of either one together.
Unlike accelerate, which steps the policy inside its backward pass, we step after the guards have checked
the gradient; until then it can be dropped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import CheckpointError
from ...models.critic import SeparateCritic
from ..bridge import Bridge
from ..gradients.buffers import GradientBuffer, Reduce, l2_norm
from .runtime import CriticOptimizer

FOLDER = "critic_engine"


class EngineGradient(GradientBuffer):
    """Gradient buffer of a critic in a DeepSpeed engine, which holds the gradient in shards."""

    is_empty = True

    def __init__(self, engine: Any, host: Bridge) -> None:
        super().__init__(host.critic.parameters())
        self._engine, self._accelerator = engine, host.accelerator

    def add(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Add a loss's gradient by a backward pass; all processes must call this together."""
        self._engine.set_gradient_accumulation_boundary(self._accelerator.sync_gradients)
        self._engine.backward(loss, retain_graph=retain_graph, scale_wrt_gas=False)
        self.is_empty = False

    def reduce(self, reduce: Reduce) -> None:
        """Do nothing: the backward pass has already reduced the gradient."""

    def norm(self) -> Tensor:
        """Return the L2 norm of the full gradient; all processes must call this together."""
        if self.is_empty:
            return torch.zeros(())
        pieces = [piece for group in self._groups().values() for piece in group]
        return self._accelerator.reduce(l2_norm(pieces, like=pieces[0]).square(), "sum").sqrt()

    def clip_(self, max_norm: float | None) -> Tensor:
        """Set the engine's clip of the next step to `max_norm`; return the norm of the unclipped gradient."""
        self._engine.optimizer.clip_grad = max_norm or 0.0
        return self.norm()

    def clear(self) -> None:
        """Drop the gradient added since the last step."""
        if not self.is_empty:
            self._groups().update(dict.fromkeys(self._groups()))
            self._engine.optimizer.zero_grad()
        self.is_empty = True

    def _groups(self) -> dict[int, Any]:
        """Return this process's shards of the gradient, complete at the end of a mini-batch."""
        return self._engine.optimizer.averaged_gradients


class EngineOptimizer(CriticOptimizer):
    """Optimizer of a critic in a DeepSpeed engine; it saves and loads the engine's shards."""

    engine: Any

    def save(self, folder: Path, *, writes: bool) -> None:
        """Save each process's shards of weights and moments."""
        frozen = any(not p.requires_grad for p in self.engine.module.parameters())
        self.engine.save_checkpoint(
            str(folder), tag=FOLDER, save_latest=False, exclude_frozen_parameters=frozen
        )

    def load(self, folder: Path) -> None:
        """Restore the shards that `save` wrote."""
        if not (folder / FOLDER).is_dir():
            raise CheckpointError(
                f"`{folder}` has no {FOLDER!r}: a run without DeepSpeed wrote it."
            )
        self.engine.load_checkpoint(str(folder), tag=FOLDER, load_module_strict=False)


class _Entry(nn.Module):
    """Module that the DeepSpeed engine wraps, with the critic's `values` as forward pass."""

    def __init__(self, critic: SeparateCritic) -> None:
        super().__init__()
        self.model, self._values = critic.model, critic.values

    def forward(self, *inputs: Any) -> Tensor:
        """Return the critic's values (see `Critic.values`)."""
        return self._values(*inputs)


def prepare(
    host: Bridge,
    critic: SeparateCritic,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    rate: Callable[[], float | Tensor],
) -> tuple[EngineGradient, EngineOptimizer]:
    """Wrap a critic in a DeepSpeed engine; return its gradient buffer and optimizer."""
    import deepspeed

    device = host.accelerator.device.type
    config = copy.deepcopy(host.accelerator.deepspeed_config)
    # It is set step by step.
    config["gradient_clipping"] = 0.0
    for layer in critic.head.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = partial(_in_float32, layer)  # type: ignore[method-assign]
    engine, *_ = deepspeed.initialize(
        model=_Entry(critic), optimizer=make(critic.parameters()), config=config
    )

    def values(input_ids: Tensor, attention_mask: Tensor, num_tokens: int) -> Tensor:
        # The engine has already cast the weights.
        with torch.autocast(device, enabled=False):
            return engine(input_ids, attention_mask, num_tokens)

    critic.values = values  # type: ignore[method-assign]
    gradient = EngineGradient(engine, host)
    optimizer = EngineOptimizer(engine.optimizer, gradient, rate)
    optimizer.engine = engine
    return gradient, optimizer


def _in_float32(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """Apply a head in float32, although the engine may have cast its weights to bfloat16."""
    bias = None if layer.bias is None else layer.bias.float()
    return nn.functional.linear(hidden.float(), layer.weight.float(), bias)
