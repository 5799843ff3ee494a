"""A check that all trained weights are finite."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...models.critic import SeparateCritic, SharedCritic
from ..bridge import Bridge


def first_not_finite(host: Bridge) -> str | None:
    """Return the name of the first parameter with NaN or infinity, or None; all processes must call this."""
    device, rank = host.accelerator.device, host.accelerator.process_index
    named = list(_named(host))
    sound = [torch.ones((), dtype=torch.bool, device=device)]
    for _, parameter in named:
        part = _held(parameter, rank)
        # The largest element: unlike a sum of squares it does not overflow, and NaN propagates.
        largest = torch.linalg.vector_norm(part, torch.inf) if part.numel() else part.new_zeros(())
        sound.append(largest.isfinite().to(device))
    broken = ~torch.stack(sound)
    first = torch.where(broken.any(), broken.long().argmax(), len(sound)).reshape(1)
    at = int(host.accelerator.gather(first).min())
    return None if at == len(sound) else named[at - 1][0]


def _named(host: Bridge) -> Iterator[tuple[str, nn.Parameter]]:
    critic = host.critic
    modules: dict[str, nn.Module] = {"policy": host.model}
    if isinstance(critic, SeparateCritic):
        modules["critic"] = critic.model
    elif isinstance(critic, SharedCritic):
        modules["critic"] = critic.head
    trained = {id(parameter) for parameter in critic.parameters()}
    for whose, module in modules.items():
        for name, parameter in module.named_parameters():
            its = id(parameter) in trained
            # Quantised weights have types of their own; their bits are not floats.
            plain = type(parameter) is nn.Parameter or isinstance(parameter, DTensor)
            floating = parameter.is_floating_point() and parameter.element_size() > 1
            if plain and floating and not parameter.is_meta and (its or parameter.requires_grad):
                yield f"{'critic' if its else whose}: {name}", parameter


def _held(parameter: nn.Parameter, rank: int) -> Tensor:
    """Return this process's shard of a parameter."""
    if isinstance(parameter, DTensor):
        return parameter.to_local().detach()
    # ZeRO-3 keeps a piece of the parameter here.
    piece: Tensor | None = getattr(parameter, "ds_tensor", None)
    if piece is None:
        return parameter.detach()
    left = getattr(parameter, "ds_numel") - rank * piece.numel()  # noqa: B009 (unknown to mypy)
    # The rest is unwritten padding.
    return piece.flatten()[: max(0, left)]
