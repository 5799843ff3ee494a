"""The critic beside a sharded policy: its gradient, its optimizer, and its saving and loading."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from ...errors import CheckpointError
from ...models.critic import Critic, SeparateCritic, SharedCritic
from ..step import GradientBuffer, l2_norm
from ..sums import Reduce
from . import runtime
from .runtime import CriticOptimizer, cut, is_in_pieces, unpartitioned, whole

FOLDER = "critic_engine"
MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
ENTRY = "state_values"


class EngineGradient(GradientBuffer):
    """Gradient buffer of a critic whose DeepSpeed engine holds the gradient in shards."""

    is_empty = True

    def __init__(self, engine: Any, critic: Critic, accelerator: Accelerator) -> None:
        super().__init__(critic.parameters())
        self._engine, self._accelerator = engine, accelerator

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
        """Return this process's shards of the gradient; they are complete when a mini-batch ends."""
        return self._engine.optimizer.averaged_gradients


@dataclass(eq=False)
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
            raise CheckpointError(f"`{folder}` has no {FOLDER!r}: a run without DeepSpeed wrote it.")
        self.engine.load_checkpoint(str(folder), tag=FOLDER, load_module_strict=False)


class _Entry(nn.Module):
    """Module that the DeepSpeed engine wraps, with the critic's `values` as forward pass."""

    def __init__(self, critic: SeparateCritic) -> None:
        super().__init__()
        self.model, self._values = critic.model, critic.values

    def forward(self, *inputs: Any) -> Tensor:
        """Return the critic's values (see `Critic.values`)."""
        return self._values(*inputs)


def prepare_deepspeed(
    critic: SeparateCritic,
    accelerator: Accelerator,
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    rate: Callable[[], float | Tensor],
) -> tuple[EngineGradient, EngineOptimizer]:
    """Wrap a critic in a DeepSpeed engine; return its gradient buffer and optimizer."""
    import deepspeed

    device = accelerator.device.type
    config = copy.deepcopy(accelerator.deepspeed_config)
    config["gradient_clipping"] = 0.0
    for layer in critic.head.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = partial(_in_float32, layer)  # type: ignore[method-assign]
    engine, *_ = deepspeed.initialize(
        model=_Entry(critic), optimizer=make(critic.parameters()), config=config
    )

    def values(input_ids: Tensor, attention_mask: Tensor, num_tokens: int, **images: Tensor) -> Tensor:
        # Autocast is off, because the engine has already cast the weights.
        with torch.autocast(device, enabled=False):
            return engine(input_ids, attention_mask, num_tokens)

    critic.values = values  # type: ignore[method-assign]
    gradient = EngineGradient(engine, critic, accelerator)
    return gradient, EngineOptimizer(engine.optimizer, gradient, rate, engine)


def _in_float32(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """Apply a head in float32, although the engine may have cast its weights to bfloat16."""
    bias = None if layer.bias is None else layer.bias.float()
    return nn.functional.linear(hidden.float(), layer.weight.float(), bias)


class ShardedGradient(GradientBuffer):
    """Gradient buffer of a critic sharded by FSDP2, whose backward passes reduce the gradient.

    The gradient is moved out of `.grad`, because upstream would clip a shared critic's and the policy's
    gradient together.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], total: Reduce) -> None:
        super().__init__(parameters)
        self._total = total

    def add(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Add a loss's gradient by a backward pass; all processes must call this together."""
        loss.backward(retain_graph=retain_graph)
        for i, parameter in enumerate(self.parameters):
            grad, so_far = parameter.grad, self._grads[i]
            parameter.grad = None
            if grad is not None:
                self._grads[i] = grad if so_far is None else so_far.add_(grad)

    def reduce(self, reduce: Reduce) -> None:
        """Do nothing: the backward pass has already reduced the gradient."""

    def norm(self) -> Tensor:
        """Return the L2 norm of the full gradient; all processes must call this together."""
        pieces = [None if grad is None else grad.to_local() for grad in self._grads]  # type: ignore[attr-defined]
        return self._total(l2_norm(pieces, like=self.parameters[0]).square()).sqrt()


def prepare(
    critic: Critic,
    policy: nn.Module,
    accelerator: Accelerator,
    make: MakeOptimizer,
    rate: Callable[[], float | Tensor],
) -> tuple[GradientBuffer, CriticOptimizer]:
    """Make the critic's gradient buffer, and its optimizer with learning rate `rate()`, on all processes."""
    engine = accelerator.distributed_type
    if engine == DistributedType.DEEPSPEED:
        if isinstance(critic, SeparateCritic) and not _is_packed(critic):
            return prepare_deepspeed(critic, accelerator, make, rate)
    elif engine == DistributedType.FSDP and isinstance(critic, SharedCritic | SeparateCritic):
        _shard(critic, policy, accelerator)
    parameters = critic.parameters()
    gradient = GradientBuffer(parameters)
    if any(is_in_pieces(parameter) for parameter in parameters):
        gradient = ShardedGradient(parameters, lambda part: accelerator.reduce(part, "sum"))
    return gradient, CriticOptimizer(make(gradient.parameters), gradient, rate)


def _shard(critic: SharedCritic | SeparateCritic, policy: Any, accelerator: Accelerator) -> None:
    """Shard the critic by FSDP2 in the same way as accelerate shards the policy."""
    model = critic.model
    if _is_packed(critic):
        return
    if accelerator.mixed_precision != "no":
        # accelerate casts trained weights to float32; the head is sharded here, so cast it here.
        critic.head.float()
    mesh = next(p.device_mesh for p in policy.parameters() if is_in_pieces(p))
    # The head is a separate unit, because it has its own precision.
    fully_shard(critic.head, mesh=mesh)
    if isinstance(critic, SeparateCritic):
        plugin: Any = accelerator.state.fsdp_plugin
        names = plugin.transformer_cls_names_to_wrap
        kinds = {type(module).__name__ for module in model.modules()}
        if not kinds & set(names or ()):
            plugin.transformer_cls_names_to_wrap = None
        fsdp2_prepare_model(accelerator, model)
        plugin.transformer_cls_names_to_wrap = names
    else:
        # Gather all weights once: torch fails at the end of a backward pass if unused weights (here the
        # policy's head) were never gathered.
        for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
            unit.unshard()
            unit.reshard()
    # Weights outside layers are gathered on entry to the root, so the root must compute the values. The
    # output gets a hook, so it must not be a view.
    values = critic.values
    setattr(model, ENTRY, lambda *states: values(*states).clone())
    register_fsdp_forward_method(model, ENTRY)
    critic.values = getattr(model, ENTRY)  # type: ignore[method-assign]


def _is_packed(critic: SharedCritic | SeparateCritic) -> bool:
    """Return whether the critic's weights are quantised, so that they cannot be sharded."""
    return bool(getattr(critic.model, "is_quantized", False))


@contextmanager
def gathered(critic: Critic, *, saves: bool) -> Iterator[None]:
    """Context manager to gather a sharded critic, which one process saves; all processes must enter it."""
    pieces = any(is_in_pieces(parameter) for parameter in critic.parameters())
    if not pieces or not isinstance(critic, SharedCritic | SeparateCritic):
        yield
        return
    module = critic.model if isinstance(critic, SeparateCritic) else critic.head
    plain = not hasattr(module, "peft_config")
    state = module.state_dict(keep_vars=True).items()
    critic.full = {n: whole(value, saves) for n, value in state if plain or value.requires_grad}
    try:
        yield
    finally:
        critic.full = None


@contextmanager
def loading(critic: Critic) -> Iterator[None]:
    """Context manager to load unsharded weights into the critic; all processes must enter it."""
    handles = []
    parameters: list[nn.Parameter] = []
    if isinstance(critic, SharedCritic | SeparateCritic):
        parameters = list(critic.model.parameters())
        for module in (critic.model, critic.head):
            handles.append(module.register_load_state_dict_pre_hook(_cut_all))
    try:
        with unpartitioned(), runtime.gathered(parameters, writer=0):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _cut_all(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Replace full weights in a state dict by this process's shards."""
    for name, own in module.state_dict().items():
        if is_in_pieces(own) and prefix + name in state:
            state[prefix + name] = cut(state[prefix + name], own)
