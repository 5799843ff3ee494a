"""Gradient buffers outside `.grad`, because upstream clips all of `.grad`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Reduce = Callable[[Tensor], Tensor]


class GradientBuffer:
    """Accumulates gradients of losses with respect to a list of parameters, outside `.grad`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._grads: list[Tensor | None] = [None] * len(self.parameters)

    @property
    def is_empty(self) -> bool:
        """Return whether nothing has been added since the last `clear`."""
        return all(grad is None for grad in self._grads)

    def add(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Add the gradient of a scalar loss to the buffer, without touching `.grad` or DDP's hooks."""
        grads = torch.autograd.grad(
            loss, self.parameters, retain_graph=retain_graph, allow_unused=True
        )
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            so_far = self._grads[i]
            self._grads[i] = grad.detach() if so_far is None else so_far.add_(grad)

    def reduce(self, reduce: Reduce) -> None:
        """Reduce the gradients over processes; an empty buffer contributes zeros."""
        for i, parameter in enumerate(self.parameters):
            grad = self._grads[i]
            grad = torch.zeros_like(parameter) if grad is None else grad
            self._grads[i] = reduce(grad)

    def norm(self) -> Tensor:
        """Return the L2 norm of the buffered gradient, [] in at least float32; 0 if empty."""
        if not self.parameters:
            return torch.zeros(())
        return l2_norm(self._grads, like=self.parameters[0])

    def dot_grad(self) -> Tensor:
        """Return the inner product of the buffered gradient and `.grad`, [] in at least float32."""
        total = torch.zeros((), device=self.parameters[0].device, dtype=_wide(self.parameters[0]))
        for parameter, grad in zip(self.parameters, self._grads, strict=True):
            if grad is not None and parameter.grad is not None:
                total += (grad.to(total.dtype) * parameter.grad.to(total.dtype)).sum()
        return total

    def clip_(self, max_norm: float | None) -> Tensor:
        """Clip the gradient to `max_norm`, None or 0 for no clip; return the norm before clipping."""
        norm = self.norm()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else None
        for grad in self._grads:
            if grad is not None and factor is not None:
                grad.mul_(factor)
        return norm

    def add_to_grad(self) -> None:
        """Add the buffered gradient to the parameters' `.grad`."""
        for parameter, grad in zip(self.parameters, self._grads, strict=True):
            if grad is None:
                continue
            if parameter.grad is None:
                parameter.grad = grad.to(parameter.dtype)
            else:
                parameter.grad.add_(grad)

    def clear(self) -> None:
        """Drop the buffer's tensors."""
        self._grads = [None] * len(self.parameters)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def l2_norm(tensors: Sequence[Tensor | None], *, like: Tensor) -> Tensor:
    """Return the joint L2 norm of tensors, [] in at least float32; None counts as zero."""
    norms = [torch.linalg.vector_norm(t, dtype=_wide(t)) for t in tensors if t is not None]
    if not norms:
        return torch.zeros((), device=like.device, dtype=_wide(like))
    return torch.linalg.vector_norm(torch.stack(norms))


def grad_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the L2 norm of the parameters' `.grad`."""
    return l2_norm([p.grad for p in parameters], like=parameters[0])
