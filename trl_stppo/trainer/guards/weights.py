"""The search for trained weights that are not finite."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...models.critic import Critic, SeparateCritic, SharedCritic


def first_not_finite(model: nn.Module, critic: Critic, accelerator: Accelerator) -> str | None:
    """Return the name of the first parameter with NaN or infinity, or None; all processes must call this."""
    device, rank = accelerator.device, accelerator.process_index
    named = list(_named(model, critic))
    sound = [torch.ones((), dtype=torch.bool, device=device)]
    for _, parameter in named:
        part = _held(parameter, rank)
        # Test the largest element: unlike a sum of squares it does not overflow, and NaN propagates.
        largest = torch.linalg.vector_norm(part, torch.inf) if part.numel() else part.new_zeros(())
        sound.append(largest.isfinite().to(device))
    broken = ~torch.stack(sound)
    first = torch.where(broken.any(), broken.long().argmax(), len(sound)).reshape(1)
    at = int(accelerator.gather(first).min())
    return None if at == len(sound) else named[at - 1][0]


def _named(model: nn.Module, critic: Critic) -> Iterator[tuple[str, nn.Parameter]]:
    modules: dict[str, nn.Module] = {"policy": model}
    if isinstance(critic, SeparateCritic):
        modules["critic"] = critic.model
    elif isinstance(critic, SharedCritic):
        modules["critic"] = critic.head
    trained = {id(parameter) for parameter in critic.parameters()}
    for whose, module in modules.items():
        for name, parameter in module.named_parameters():
            its = id(parameter) in trained
            # Skip quantised weights, which have other types: their bits are not floats.
            plain = type(parameter) is nn.Parameter or isinstance(parameter, DTensor)
            floating = parameter.is_floating_point() and parameter.element_size() > 1
            if plain and floating and not parameter.is_meta and (its or parameter.requires_grad):
                yield f"{'critic' if its else whose}: {name}", parameter


def _held(parameter: nn.Parameter, rank: int) -> Tensor:
    """Return this process's shard of a parameter."""
    if isinstance(parameter, DTensor):
        return parameter.to_local().detach()
    # ZeRO-3 keeps this process's shard in `ds_tensor`.
    piece: Tensor | None = getattr(parameter, "ds_tensor", None)
    if piece is None:
        return parameter.detach()
    left = getattr(parameter, "ds_numel") - rank * piece.numel()  # noqa: B009 (unknown to mypy)
    return piece.flatten()[: max(0, left)]
