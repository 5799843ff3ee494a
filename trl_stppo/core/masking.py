"""Checks of shapes and dtypes, and zeros in place of values under a False mask.

True in a mask always means "counts". Values under a False become zero *before* any
arithmetic: multiplying by the mask afterwards would let NaN through, in the value and (as 0 * inf)
in the gradient. The checks read metadata only, so that nothing here synchronises with a GPU.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of `allowed`. The error lists the allowed values."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def check_shape(name: str, tensor: Tensor, expected: Sequence[int], like: str) -> None:
    """Raise ValueError unless `tensor` has the shape `expected`. The error explains that shape by `like`."""
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(f"{name} has shape {list(tensor.shape)}, but {list(expected)} is needed ({like})")


def check_float(**tensors: Tensor) -> None:
    """Raise ValueError if a tensor is not floating point. The error names the tensor by its keyword."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {tensor.dtype}")


def check_mask(name: str, mask: Tensor) -> None:
    """Raise ValueError unless `mask` is a [B, T] bool tensor."""
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} must be bool (True = counts), got {mask.dtype}")
    if mask.dim() != 2:
        raise ValueError(f"{name} must be [B, T], got shape {list(mask.shape)}")


def check_turn_index(turn_index: Tensor) -> None:
    """Raise ValueError unless `turn_index` is a [B, T] int64 tensor."""
    if turn_index.dtype != torch.int64:
        raise ValueError(f"turn_index must be int64 (-1 outside turns), got {turn_index.dtype}")
    if turn_index.dim() != 2:
        raise ValueError(f"turn_index must be [B, T], got shape {list(turn_index.shape)}")


def check_turn_count(what: str, count: int, turn_index: Tensor) -> None:
    """Raise ValueError if an episode has more than `count` turns. `what`: the limit's name in the error.

    On a GPU this check would synchronise, so an index out of range ends the run instead.
    """
    if turn_index.device.type != "cpu" or not turn_index.numel():
        return
    turns = int(turn_index.max()) + 1
    if turns > count:
        raise ValueError(f"{what} is {count}, but turn_index has {turns} turns")


def check_turn_columns(name: str, x: Tensor, turn_index: Tensor) -> None:
    """Raise ValueError unless `x` is [B, K] with the B of `turn_index` and a column for each turn."""
    if x.dim() != 2 or x.shape[0] != turn_index.shape[0]:
        shapes = f"{list(x.shape)} and {list(turn_index.shape)}"
        raise ValueError(f"{name} must be [B, K] with the B of turn_index, got shapes {shapes}")
    check_turn_count(f"number of columns of {name}", x.shape[1], turn_index)


def check_like(reference_name: str, reference: Tensor, **tensors: Tensor) -> None:
    """Raise ValueError if a tensor's shape differs from `reference`. The error names the tensor's keyword."""
    for name, tensor in tensors.items():
        check_shape(name, tensor, reference.shape, f"the shape of {reference_name}")


class _FromFloat16(torch.autograd.Function):
    """Casts float16 to float32. The backward pass caps gradients at the largest float16 number."""

    @staticmethod
    def forward(_ctx: object, x: Tensor) -> Tensor:
        return x.float()

    @staticmethod
    def backward(_ctx: object, gradient: Tensor) -> Tensor:
        most = torch.finfo(torch.float16).max
        return torch.where(gradient.isinf(), gradient, gradient.clamp(-most, most)).half()


def upcast(x: Tensor) -> Tensor:
    """Return half-precision `x` in float32, and any other `x` unchanged. Gradients flow through.

    Sums over hundreds of tokens lose all their digits in bfloat16, so `core` computes and returns at
    least float32. A finite gradient too large for float16 becomes float16's largest number.
    """
    if x.dtype == torch.float16:
        return _FromFloat16.apply(x)
    return x.float() if x.dtype == torch.bfloat16 else x


def widest(x: Tensor) -> Tensor:
    """Return `x` in float64, or in float32 on Apple's GPUs, which lack float64. Gradients flow through."""
    return x.float() if x.device.type == "mps" else x.double()


def zero_off_mask(x: Tensor, mask: Tensor) -> Tensor:
    """Return `x` with 0, also in place of NaN, where `mask` is False. The gradient is 0 there.

    Args:
        x: any shape, any numeric dtype.
        mask: bool, broadcastable to the shape of `x`.

    Returns:
        Same shape and dtype as `x`.
    """
    return x.masked_fill(~mask, 0)
