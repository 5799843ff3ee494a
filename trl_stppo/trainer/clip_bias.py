"""Measures the clipping bias of an optimizer step exactly, and applies its correction.

g is the gradient of the kept terms, C that of the clipped ones; both over all policy parameters, all
micro-batches, all processes. C is a second backward pass through the same graph, run only where a
token is clipped. Terms that are neither (entropy bonus, loss-side KL, router loss) wait apart, so that
they are not scaled and do not count into either norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..core import ClippedSurrogate
from ..core.clip_bias import cosine, normalization_scale
from .gradients import GradientBuffer, Reduce, grad_norm


class ClipBiasCorrection:
    """One instance per training run.

    Args:
        parameters: trainable parameters of the policy.
        mode, power: see `core.clip_bias.normalization_scale`.
        target: "gradient" or "update".

    Source: arXiv:2511.20718v1, Lemma 4.2 and Section 5.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], *, mode: str, power: float, target: str
    ) -> None:
        self._parameters = list(parameters)
        self._mode, self._power, self._target = mode, power, target
        self._bias = GradientBuffer(parameters)
        self._extra = GradientBuffer(parameters)

    def observe(self, surrogate: ClippedSurrogate, share: Tensor, extra: Tensor | None) -> None:
        """Add a micro-batch: the clipped terms, and what must stay unscaled.

        Args:
            surrogate: its per-token terms, with their graph.
            share: [B, T], weight of each token in the mini-batch's loss.
            extra: scalar loss of the other terms, or None.
        """
        if bool(surrogate.is_clipped.any()):
            self._bias.add(-(surrogate.clipped * share).sum(), retain_graph=True)
        if extra is not None and extra.requires_grad:
            self._extra.add(extra, retain_graph=True)

    def finish(self, mean_over_processes: Reduce | None) -> tuple[float, dict[str, float]]:
        """Close the optimizer step: g is in `.grad`, reduced already.

        Args:
            mean_over_processes: None for a single process.

        Returns:
            The factor for the update (1 unless the target is "update"), and the figures to log.
        """
        if mean_over_processes is not None:
            self._reduce(mean_over_processes)
        kept, bias = grad_norm(self._parameters), self._bias.norm()
        scale = normalization_scale(kept, bias, self._mode, self._power)
        figures = {
            "clip_bias/norm": float(bias),
            "clip_bias/grad_norm": float(kept),
            "clip_bias/scale": float(scale),
            "clip_bias/cosine": float(cosine(self._bias.dot_grad(), kept, bias)),
        }
        self._bias.clear()
        factor = 1.0
        if self._target == "update":
            factor = figures["clip_bias/scale"]
        elif self._mode != "none":
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        self._extra.add_to_grad()
        self._extra.clear()
        return factor, figures

    def _reduce(self, mean_over_processes: Reduce) -> None:
        device = self._parameters[0].device
        used = [not self._bias.is_empty, not self._extra.is_empty]
        anywhere = mean_over_processes(torch.tensor(used, dtype=torch.float32, device=device))
        for buffer, flag in zip((self._bias, self._extra), anywhere.tolist(), strict=True):
            if flag > 0:
                buffer.reduce(mean_over_processes)
