"""The clipping bias, exact or estimated, and the factor on the policy's optimizer step.

g is the gradient of the kept terms and C the gradient of the clipped terms, both over all policy
parameters, micro-batches and processes. C takes no time if no token is clipped. If few episodes have
clipped tokens, C takes a second pass through only these episodes, otherwise a second backward pass
through the same graph. The other terms (entropy bonus, loss-side KL, router loss) have a separate
buffer, so they are not scaled and are in neither norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core import ClippedSurrogate, logit_space_squares
from ..core.policy import cosine, normalization_scale
from .batch import Batch, row_tokens
from .gradient_buffer import GradientBuffer, Reduce, grad_norm
from .sharding.runtime import is_sharded
from .stabilizers import GRADIENT, STEP, Stabilizer, TrustRegion
from .sums import wide

# Largest share of tokens in clipped episodes for a second pass, which costs a forward and a backward pass
# of these episodes. The alternative is a backward pass of all episodes of the micro-batch, which takes at
# least as long as a forward pass.
FEW = 0.5


def has_dropout(model: nn.Module) -> bool:
    """Return whether the model has dropout or router noise, so that two forward passes may differ."""
    for module in model.modules():
        for name, value in vars(module).items():
            # Attention and routers have rates outside nn.Dropout; PEFT has a dict with a rate per adapter.
            random = "drop" in name or "jitter" in name
            rates = value.values() if isinstance(value, dict) else (value,)
            if (random or (name == "p" and isinstance(module, nn.Dropout))) and any(
                isinstance(rate, float) and rate > 0 for rate in rates
            ):
                return True
    return False


# Rows [b] int64 of a micro-batch, and coefficients [b, T] of their clipped terms. A second forward pass gives
# the gradient of the negative sum of coefficients times log ratios.
SecondPass = tuple[Tensor, Tensor]


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

        `weights`, [B, T]: weights of tokens in the mini-batch's loss. `tokens`, [B]: tokens of each row,
        the cost of a pass. Return the terms that `add` must get after the graph is freed, or None.
        """
        if extra is not None and extra.requires_grad:
            self._extra.add(extra, retain_graph=True)
        rows = surrogate.is_clipped.any(dim=1)
        cost = torch.stack([(tokens * rows).sum(), tokens.sum()]).tolist()
        if not cost[0]:
            return None
        if self._repeatable and cost[0] <= FEW * cost[1]:
            clipped_rows = rows.nonzero().squeeze(1)
            return clipped_rows, (surrogate.clipped * weights).detach()[clipped_rows]
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
        # The gradient is scaled here; a step is scaled by the optimizer's hooks (`StepScale.attach`).
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


class ClipBiasEstimate:
    """Estimates the gradient norms of kept and clipped terms in logit space, without gradients of weights.

    Estimates are available before the last backward pass of a mini-batch. If an engine shards gradients or
    steps inside the backward pass, only estimates are available. Exact norms have another unit.
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
        squares = []
        for terms in (surrogate.kept, surrogate.clipped):
            loss = (terms * weights).sum()
            (by_logprob,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
            squares.append(logit_space_squares(by_logprob, logprobs, entropies, loss_mask).sum())
        self._squares = self._squares + wide(torch.stack(squares))

    def clear(self) -> None:
        """Reset the estimate for a new mini-batch."""
        self._squares = torch.zeros_like(self._squares)

    def finish(self, sum_over_processes: Reduce, num_processes: int) -> tuple[Tensor, Tensor]:
        """Return the estimated gradient norms of kept and clipped terms, [] each, over all processes."""
        kept, clipped = sum_over_processes(self._squares).sqrt() / num_processes
        self.clear()
        return kept, clipped


class StepScale:
    """The factor on the policy's next optimizer step, and its measurements; one instance per training run.

    Gradient norms are exact if gradients are not sharded and the configuration takes a second gradient,
    otherwise estimates. `factor` scales the policy's learning rate, and thus decoupled weight decay.
    """

    def __init__(self, args: Any, accelerator: Any, stabilizers: Sequence[Stabilizer]) -> None:
        self._args, self._accelerator = args, accelerator
        self.stabilizers = stabilizers
        self._scaler = next((each for each in stabilizers if each.scale_target), None)
        self.region = next((each for each in stabilizers if isinstance(each, TrustRegion)), None)
        self.correction: ClipBiasCorrection | None = None
        self.estimate: ClipBiasEstimate | None = None
        self.factor = 1.0
        self._rates: list[float | Tensor] = []

    def attach(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[int] | None,
        policy: nn.Module,
        critic: Sequence[nn.Parameter],
    ) -> None:
        """Scale the steps of `groups` (None: all), and prepare the measurement of the clipping bias."""

        def chosen(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
            # Read the groups at each step, because an engine may have dropped empty groups.
            every = optimizer.param_groups
            return every if groups is None else [every[i] for i in groups]

        def scale_rates(optimizer: torch.optim.Optimizer, *_: object) -> None:
            self._rates = [group["lr"] for group in chosen(optimizer)]
            if self.factor != 1.0:
                for group in chosen(optimizer):
                    group["lr"] = group["lr"] * self.factor

        def restore_rates(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for group, rate in zip(chosen(optimizer), self._rates, strict=True):
                group["lr"] = rate

        optimizer.register_step_pre_hook(scale_rates)
        optimizer.register_step_post_hook(restore_rates)
        if not self._args.measures_clip_bias:
            return
        self.estimate = ClipBiasEstimate(self._accelerator.device)
        if not self._is_estimate:
            others = {id(parameter) for parameter in critic}
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            trained = [p for p in parameters if id(p) not in others]
            self.correction = ClipBiasCorrection(trained, repeatable=not has_dropout(policy))

    @property
    def _is_estimate(self) -> bool:
        return is_sharded(self._accelerator) or not self._args.takes_second_gradient

    def start_mini_batch(self) -> None:
        """Reset factor and measurements for a mini-batch."""
        self.factor = 1.0
        for bias in (self.correction, self.estimate):
            if bias is not None:
                bias.clear()
        if self.region is not None:
            self.region.start_mini_batch()

    def observe(
        self,
        surrogate: ClippedSurrogate,
        weights: Tensor,
        extra: Tensor | None,
        batch: Batch,
        logprobs: Tensor,
        entropies: Tensor,
    ) -> tuple[SecondPass | None, Tensor | None]:
        """Measure a pass of the policy's loss before its backward pass.

        The terms, `weights` and log-probabilities are [B, T]; `extra` are the loss's other terms, or None.
        Return the terms whose gradient needs a second pass, or None; and `extra`, detached if its gradient
        has been taken.
        """
        mask = batch["loss_mask"]
        if self.estimate is not None:
            self.estimate.observe(surrogate, weights, logprobs, entropies, mask)
        if self.correction is None:
            return None, extra
        second_pass = self.correction.observe(surrogate, weights, extra, row_tokens(batch))
        return second_pass, None if extra is None else extra.detach()

    def before_last_backward(self) -> dict[str, Tensor | float]:
        """Multiply the factor by what is known before a mini-batch's last backward pass; return metrics."""
        figures: dict[str, Tensor | float] = {}
        if self.region is not None:
            self.region.measure(self._accelerator.reduce, self._accelerator.device)
            self.factor *= self.region.factor
        if self.estimate is None:
            return figures
        kept, clipped = self.estimate.finish(
            self._accelerator.reduce, self._accelerator.num_processes
        )
        share = normalization_scale(kept, clipped, "share")
        figures["clip_bias/estimated_share"] = share
        figures["clip_bias/is_estimate"] = float(self._is_estimate)
        if self._is_estimate:
            figures |= {
                "clip_bias/norm": clipped,
                "clip_bias/grad_norm": kept,
                "clip_bias/share": share,
            }
            if self._scaler is not None:
                figures["clip_bias/scale"] = scale = float(self._scaler.scale(kept, clipped))
                self.factor *= scale
        return figures

    def finish(self, mean_over_processes: Reduce | None) -> dict[str, float]:
        """Correct the complete gradient, and multiply the factor by the exact scale; return metrics."""
        if self.correction is None:
            return {}
        factor, figures = self.correction.finish(mean_over_processes, self._scaler)
        self.factor *= factor
        return figures
