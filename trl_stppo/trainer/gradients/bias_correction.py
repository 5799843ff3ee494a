"""Measures or estimates the clipping bias of an optimizer step, and corrects it.

g is the gradient of the kept terms, C that of the clipped ones; both over all policy parameters, all
micro-batches, all processes. C takes no time if no token is clipped. If the clipped tokens are in
few episodes, C takes a second pass through these alone, else a second backward pass through the same
graph. Terms that are neither (entropy bonus, loss-side KL, router loss) have a buffer of their own, so
that they are not scaled and count in neither norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...core import ClippedSurrogate, logit_space_squares
from ...core.policy import cosine, normalization_scale
from ..stabilizers import GRADIENT, STEP, Stabilizer
from ..sums import wide
from .buffers import GradientBuffer, Reduce, grad_norm

# A pass of their own costs a forward and a backward pass of the clipped episodes. The other way costs a
# backward pass of all episodes of the micro-batch, which takes at least as long as a forward pass.
FEW = 0.5


def has_dropout(model: nn.Module) -> bool:
    """Whether the model has dropout or router noise, so that two forward passes may differ."""
    for module in model.modules():
        for name, value in vars(module).items():
            # Attention and routers draw with rates of their own; PEFT keeps one per adapter.
            random = "drop" in name or "jitter" in name
            rates = value.values() if isinstance(value, dict) else (value,)
            if (random or (name == "p" and isinstance(module, nn.Dropout))) and any(
                isinstance(rate, float) and rate > 0 for rate in rates
            ):
                return True
    return False


class SecondPass(NamedTuple):
    """Rows and coefficients of clipped terms whose gradient needs a second forward pass.

    It is the gradient of the negative sum of the coefficients times the log ratios.

    Attributes:
        rows: [b] int64, rows of the micro-batch.
        coefficient: [b, T] float.
    """

    rows: Tensor
    coefficient: Tensor


class ClipBiasCorrection:
    """Measures and corrects the clipping bias; one instance per training run.

    `repeatable`: whether a second pass through the policy gives the same result.

    Source: arXiv:2511.20718v1, Lemma 4.2 and Section 5.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, repeatable: bool) -> None:
        self._repeatable = repeatable
        self._parameters = list(parameters)
        self._bias = GradientBuffer(parameters)
        self._extra = GradientBuffer(parameters)

    def observe(
        self, surrogate: ClippedSurrogate, weights: Tensor, extra: Tensor | None, tokens: Tensor
    ) -> SecondPass | None:
        """Add the gradients of a micro-batch's clipped terms and of the unscaled loss `extra`.

        `weights`, [B, T], are of tokens in the mini-batch's loss; `tokens`, [B], are the cost of a pass.
        Return the terms left to `add` after the graph is freed; None if there are none.
        """
        if extra is not None and extra.requires_grad:
            self._extra.add(extra, retain_graph=True)
        rows = surrogate.is_clipped.any(dim=1)
        cost = torch.stack([(tokens * rows).sum(), tokens.sum()]).tolist()
        if not cost[0]:
            return None
        if self._repeatable and cost[0] <= FEW * cost[1]:
            clipped_rows = rows.nonzero().squeeze(1)
            return SecondPass(clipped_rows, (surrogate.clipped * weights).detach()[clipped_rows])
        self.add(-(surrogate.clipped * weights).sum(), retain_graph=True)
        return None

    def add(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Add the gradient of `loss`, the negative sum of clipped terms."""
        self._bias.add(loss, retain_graph=retain_graph)

    def clear(self) -> None:
        """Drop all gradients before a new mini-batch."""
        self._bias.clear()
        self._extra.clear()

    def finish(
        self, mean_over_processes: Reduce | None, scaler: Stabilizer | None
    ) -> tuple[float, dict[str, float]]:
        """Correct the reduced gradient in `.grad`; return the factor on the optimizer step, and metrics."""
        if mean_over_processes is not None:
            self._reduce(mean_over_processes)
        kept, bias = grad_norm(self._parameters), self._bias.norm()
        scale = 1.0 if scaler is None else scaler.scale(kept, bias)
        figures = {
            "clip_bias/norm": float(bias),
            "clip_bias/grad_norm": float(kept),
            "clip_bias/share": float(normalization_scale(kept, bias, "share")),
            "clip_bias/scale": float(scale),
            "clip_bias/cosine": float(cosine(self._bias.dot_grad(), kept, bias)),
        }
        target = None if scaler is None else scaler.scale_target
        if target == GRADIENT:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        self._extra.add_to_grad()
        self.clear()
        return figures["clip_bias/scale"] if target == STEP else 1.0, figures

    def _reduce(self, mean_over_processes: Reduce) -> None:
        device = self._parameters[0].device
        used = [not self._bias.is_empty, not self._extra.is_empty]
        anywhere = mean_over_processes(torch.tensor(used, dtype=torch.float32, device=device))
        for buffer, flag in zip((self._bias, self._extra), anywhere.tolist(), strict=True):
            if flag > 0:
                buffer.reduce(mean_over_processes)


def coefficients(
    surrogate: ClippedSurrogate, weights: Tensor, logprobs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return derivatives of the weighted kept and clipped terms by log p(y_t), [B, T] each."""
    kept, clipped = (
        torch.autograd.grad((terms * weights).sum(), logprobs, retain_graph=True)[0]
        for terms in (surrogate.kept, surrogate.clipped)
    )
    return kept, clipped


class ClipBiasEstimate:
    """Estimates the gradient norms of kept and clipped terms in logit space, without gradients of weights.

    They are available before the last backward pass of a mini-batch. If an engine shards gradients
    or steps inside the backward pass, only they are available. Their unit differs from the exact norms'.
    """

    def __init__(self, device: torch.device) -> None:
        self._squares = wide(torch.zeros(2, device=device))

    def observe(
        self,
        surrogate: ClippedSurrogate,
        weights: Tensor,
        logprobs: Tensor,
        entropies: Tensor,
        loss_mask: Tensor,
    ) -> None:
        """Add a micro-batch of tensors [B, T]; `surrogate` must have its graph back to `logprobs`."""
        squares = [
            logit_space_squares(part, logprobs, entropies, loss_mask).sum()
            for part in coefficients(surrogate, weights, logprobs)
        ]
        self._squares = self._squares + wide(torch.stack(squares))

    def clear(self) -> None:
        """Reset the estimate for a new mini-batch."""
        self._squares = torch.zeros_like(self._squares)

    def finish(self, sum_over_processes: Reduce, num_processes: int) -> tuple[Tensor, Tensor]:
        """Return the estimated gradient norms of kept and clipped terms, [] each, over all processes."""
        kept, clipped = sum_over_processes(self._squares).sqrt() / num_processes
        self.clear()
        return kept, clipped
