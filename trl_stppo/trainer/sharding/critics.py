"""The critic beside an engine: who adds up its gradient and steps it, and how it is saved whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from ...models.critic import SeparateCritic, SharedCritic
from ..bridge import Bridge
from ..gradients.buffers import GradientBuffer, Reduce, l2_norm
from . import deepspeed_critic, runtime
from .runtime import CriticOptimizer, cut, is_in_pieces, unpartitioned, whole

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
ENTRY = "state_values"  # what the critic's passes are called on a module that gathers its weights


class ShardedGradient(GradientBuffer):
    """The gradient of a module in FSDP2's pieces, which its hooks reduce in each backward pass.

    It is moved out of `.grad`, where upstream would clip that of a shared critic along with the policy's.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], total: Reduce) -> None:
        super().__init__(parameters)
        self._total = total

    def add(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """See `GradientBuffer.add`; all processes call it together."""
        loss.backward(retain_graph=retain_graph)
        for i, parameter in enumerate(self.parameters):
            grad, so_far = parameter.grad, self._grads[i]
            parameter.grad = None
            if grad is not None:
                self._grads[i] = grad if so_far is None else so_far.add_(grad)

    def reduce(self, reduce: Reduce) -> None:
        """Nothing is left to do."""

    def norm(self) -> Tensor:
        """See `GradientBuffer.norm`; all processes call it together, and get that of the whole."""
        pieces = [None if grad is None else grad.to_local() for grad in self._grads]  # type: ignore[attr-defined]
        return self._total(l2_norm(pieces, like=self.parameters[0]).square()).sqrt()


def prepare(
    host: Bridge, make: MakeOptimizer, rate: Callable[[], float | Tensor]
) -> tuple[GradientBuffer, CriticOptimizer]:
    """The gradient of the critic, and what steps it.

    All processes call it together. `rate` gives the learning rate of the coming step.
    """
    critic = host.critic
    if host.is_deepspeed_enabled and isinstance(critic, SeparateCritic) and not _is_packed(critic):
        return deepspeed_critic.prepare(host, critic, make, rate)
    if host.is_fsdp_enabled and isinstance(critic, SharedCritic | SeparateCritic):
        _shard(critic, host)
    parameters = critic.parameters()
    gradient = GradientBuffer(parameters)
    if any(is_in_pieces(parameter) for parameter in parameters):
        gradient = ShardedGradient(parameters, lambda part: host.accelerator.reduce(part, "sum"))
    return gradient, CriticOptimizer(make(gradient.parameters), gradient, rate)


def _shard(critic: SharedCritic | SeparateCritic, host: Bridge) -> None:
    """Cut the critic into FSDP2's pieces, as accelerate has cut the policy."""
    model: Any = critic.model
    accelerator = host.accelerator
    if _is_packed(critic):
        return
    if accelerator.mixed_precision != "no":
        critic.head.float()  # as accelerate does all else that is trained, once it is cut
    mesh = next(p.device_mesh for p in host.model.parameters() if is_in_pieces(p))
    fully_shard(critic.head, mesh=mesh)  # by itself, as it computes in its own precision
    if isinstance(critic, SeparateCritic):
        plugin: Any = accelerator.state.fsdp_plugin
        names = plugin.transformer_cls_names_to_wrap  # the policy's
        kinds = {type(module).__name__ for module in model.modules()}
        if not kinds & set(names or ()):
            plugin.transformer_cls_names_to_wrap = None  # accelerate asks the model
        fsdp2_prepare_model(accelerator, model)
        plugin.transformer_cls_names_to_wrap = names
    else:
        # Torch fails where a backward pass ends and weights that it does not use, those of the policy's
        # head, have never been gathered.
        for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
            unit.unshard()
            unit.reshard()
    # Weights that belong to no layer are gathered where the root is entered, and what leaves it gets a
    # hook, which is not to be on a view.
    values = critic.values
    setattr(model, ENTRY, lambda *states: values(*states).clone())
    register_fsdp_forward_method(model, ENTRY)
    critic.values = getattr(model, ENTRY)  # type: ignore[method-assign]


def _is_packed(critic: SharedCritic | SeparateCritic) -> bool:
    """Whether its weights have to stay together."""
    return bool(getattr(critic.model, "is_quantized", False))


@contextmanager
def gathered(host: Bridge) -> Iterator[None]:
    """Within, one process can save the critic, of which each may hold pieces; all enter together."""
    critic = host.critic
    pieces = any(is_in_pieces(parameter) for parameter in critic.parameters())
    if not pieces or not isinstance(critic, SharedCritic | SeparateCritic):
        yield
        return
    module = critic.model if isinstance(critic, SeparateCritic) else critic.head
    saves, plain = host.args.should_save, not hasattr(module, "peft_config")
    state = module.state_dict(keep_vars=True).items()
    critic.whole = {n: whole(value, saves) for n, value in state if plain or value.requires_grad}
    try:
        yield
    finally:
        critic.whole = None


@contextmanager
def loading(host: Bridge) -> Iterator[None]:
    """Within, all processes can load a whole critic together, whatever they hold of it."""
    critic, handles = host.critic, []
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


def _cut_all(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Put this process's pieces in the places of whole weights."""
    for name, own in module.state_dict().items():
        if is_in_pieces(own) and prefix + name in state:
            state[prefix + name] = cut(state[prefix + name], own)
