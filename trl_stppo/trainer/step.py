"""One optimizer step of policy and critic: every gradient of a mini-batch, up to the optimizer.

    critic_grads.add  the critic's loss -> its gradient, in a buffer of its own
    add_policy        the policy's terms -> estimated norms, C, the gradients that are not scaled
    accumulate        the passes of a micro-batch but its last one, which upstream makes
    set_factor        before the last backward pass: estimated norms, the KL, their factor on the step
    close             after it: reduce and clip the critic's gradient, correct the policy's -> StepReport
    apply             Verdict -> the gradients that the optimizer leaves out

g is the gradient of the kept terms and C the gradient of the clipped terms, both over all policy
parameters, micro-batches and processes. The other terms (entropy bonus, loss-side KL, router loss) have a
separate buffer, so they are not scaled and are in neither norm. Hooks of the optimizer add the critic's
gradient, and scale the policy's learning rate, and thus decoupled weight decay, for the time of a step.

Nothing else takes a gradient, or writes a gradient or a learning rate, except the engines in `sharding/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core import ClippedSurrogate, logit_space_squares
from ..core.policy import cosine, normalization_scale
from .engine import engine_of
from .stabilizers import GRADIENT, STEP, Stabilizer, TrustRegion
from .sums import Reduce, wide

KINDS = ("the loss", "the policy's gradient", "the critic's gradient")
Policy = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Terms:
    """The terms of the policy's loss in one pass.

    Attributes:
        surrogate: kept and clipped terms of the tokens.
        weights: [B, T], weights of the tokens in the mini-batch's loss.
        extra: the other terms of the loss, [], or None.
        logprobs: [B, T] nats, with their graph.
        entropies: [B, T] nats.
        loss_mask: [B, T] bool, tokens that train.
    """

    surrogate: ClippedSurrogate
    weights: Tensor
    extra: Tensor | None
    logprobs: Tensor
    entropies: Tensor
    loss_mask: Tensor


class Verdict(StrEnum):
    """The outcome of a mini-batch, equal on all processes.

    The schedule and `global_step` go on in every case.

    ```
                   policy                        critic            counted in
    TAKEN          steps                         steps
    CRITIC_ONLY    keeps its weights             steps             guard/empty_steps, not in a warm-up
    NOT_FINITE     keeps its weights             keeps its weights guard/skipped_steps
    REFUSED        keeps its weights             steps             step/refused
    EMPTY          keeps its weights             keeps its weights guard/empty_steps
    ```

    REFUSED: the policy's KL is above the limit of `trust_region`. TAKEN, REFUSED and the CRITIC_ONLY of a
    warm-up end a row of skipped steps. DeepSpeed takes the policy's step in the backward pass: a step that is
    refused has rate 0 there, and a loss that is not finite ends the run.
    """

    TAKEN = "taken"
    CRITIC_ONLY = "critic_only"
    NOT_FINITE = "not_finite"
    REFUSED = "refused"
    EMPTY = "empty"


# Verdicts with which the critic takes its step.
CRITIC_STEPS = (Verdict.TAKEN, Verdict.CRITIC_ONLY, Verdict.REFUSED)


@dataclass(frozen=True)
class StepReport:
    """The facts about an optimizer step that is due; equal on all processes, but for `detail`.

    Attributes:
        figures: metrics of the step.
        faults: the parts that are not finite, with their processes; "" if there are none.
        detail: what is not finite; "" except on the main process and processes with non-finite losses.
        is_weightless: whether the weights of all episodes are 0.
        exceeds: whether the policy's KL is above the limit of the trust region.
    """

    figures: dict[str, float] = field(default_factory=dict)
    faults: str = ""
    detail: str = ""
    is_weightless: bool = False
    exceeds: bool = False


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
        grads = torch.autograd.grad(loss, self.parameters, retain_graph=retain_graph, allow_unused=True)
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


class ClipBias:
    """Exact gradients of the clipped terms and of the terms that are not scaled; a second backward pass.

    Source: arXiv:2511.20718v1, Lemma 4.2 and Section 5.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._bias = GradientBuffer(parameters)
        self._extra = GradientBuffer(parameters)

    def add(self, terms: Terms) -> None:
        """Add the gradients of a pass's clipped terms and of its unscaled terms; keep the graph."""
        if terms.extra is not None and terms.extra.requires_grad:
            self._extra.add(terms.extra, retain_graph=True)
        if terms.surrogate.is_clipped.any():
            clipped = (terms.surrogate.clipped * terms.weights).sum()
            self._bias.add(-clipped, retain_graph=True)

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
        kept = l2_norm([p.grad for p in self._parameters], like=self._parameters[0])
        bias = self._bias.norm()
        scale = 1.0 if scaler is None else float(scaler.scale(kept, bias))
        figures = {
            "clip_bias/norm": float(bias),
            "clip_bias/grad_norm": float(kept),
            "clip_bias/share": float(normalization_scale(kept, bias, "share")),
            "clip_bias/scale": scale,
            "clip_bias/cosine": float(cosine(self._bias.dot_grad(), kept, bias)),
        }
        target = None if scaler is None else scaler.scale_target
        if target == GRADIENT:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        self._extra.add_to_grad()
        self.clear()
        return scale if target == STEP else 1.0, figures

    def _reduce(self, mean_over_processes: Reduce) -> None:
        device = self._parameters[0].device
        used = [not self._bias.is_empty, not self._extra.is_empty]
        anywhere = mean_over_processes(torch.tensor(used, dtype=torch.float32, device=device))
        for buffer, flag in zip((self._bias, self._extra), anywhere.tolist(), strict=True):
            if flag > 0:
                buffer.reduce(mean_over_processes)


class ClipBiasEstimate:
    """Estimates the gradient norms of kept and clipped terms in logit space, without gradients of weights.

    Estimates are known before the last backward pass of a mini-batch, and engines that shard gradients have
    nothing else. Exact norms have another unit; only the ratio of two norms counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._squares = wide(torch.zeros(2, device=device))

    def add(self, terms: Terms) -> None:
        """Add a pass's terms, whose graph must reach back to the pass's log-probabilities."""
        squares, logprobs = [], terms.logprobs
        for part in (terms.surrogate.kept, terms.surrogate.clipped):
            loss = (part * terms.weights).sum()
            (by_logprob,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
            own = logit_space_squares(by_logprob, logprobs, terms.entropies, terms.loss_mask)
            squares.append(own.sum())
        self._squares = self._squares + wide(torch.stack(squares))

    def clear(self) -> None:
        """Reset the estimate for a new mini-batch."""
        self._squares = torch.zeros_like(self._squares)

    def finish(self, sum_over_processes: Reduce, num_processes: int) -> tuple[Tensor, Tensor]:
        """Return the estimated gradient norms of kept and clipped terms, [] each, over all processes."""
        kept, clipped = sum_over_processes(self._squares).sqrt() / num_processes
        self.clear()
        return kept, clipped


class Step:
    """The present optimizer step of policy and critic; one instance per training run.

    Gradient norms are exact if gradients are not sharded and the configuration takes a second gradient,
    otherwise estimates. By default no stabilizer needs a second gradient, and estimates are made if an update
    has several steps or any stabilizer. `scale` of a stabilizer multiplies the step's learning rate ("step")
    or the gradient ("gradient"); that of `share` is kept / (kept + clipped).

    Attributes:
        critic_grads: the critic's gradient; sharded runs replace the buffer.
        losses: losses of the mini-batch's micro-batches so far, detached.
        region: the trust region among `stabilizers`, or None.
        factor: factor on the policy's step.
        rests: whether the mini-batch must leave all weights unchanged.
    """

    def __init__(
        self,
        args: Any,
        accelerator: Any,
        critic: Sequence[nn.Parameter],
        stabilizers: Sequence[Stabilizer],
    ) -> None:
        self._args, self._accelerator, self.stabilizers = args, accelerator, stabilizers
        self._scaler = next((each for each in stabilizers if each.scale_target), None)
        self.region = next((each for each in stabilizers if isinstance(each, TrustRegion)), None)
        self.engine = engine_of(accelerator)
        self.critic_grads = GradientBuffer(critic)
        self.exact: ClipBias | None = None
        self.estimate: ClipBiasEstimate | None = None
        self._rates: list[float | Tensor] = []
        self.begin()

    def attach(self, optimizer: Optimizer) -> None:
        """Add hooks to the optimizer, which may also have the critic; `Optimizers.create` calls this once."""
        critic = {id(parameter) for parameter in self.critic_grads.parameters}

        def policy_groups() -> list[dict[str, Any]]:
            # Read the groups at each step, because an engine may have dropped empty groups.
            groups = optimizer.param_groups
            return [g for g in groups if not any(id(p) in critic for p in g["params"])]

        def before(*_: object) -> None:
            if not self.engine.shards:
                self.critic_grads.add_to_grad()
            self._rates = [group["lr"] for group in policy_groups()]
            for group in policy_groups() if self.factor != 1.0 else ():
                group["lr"] = group["lr"] * self.factor

        def after(*_: object) -> None:
            for group, rate in zip(policy_groups(), self._rates, strict=True):
                group["lr"] = rate
            if not self.engine.shards:
                for parameter in self.critic_grads.parameters:
                    parameter.grad = None
                self.critic_grads.clear()

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
        if self._args.measures_clip_bias:
            self.estimate = ClipBiasEstimate(self._accelerator.device)
        if self._args.takes_second_gradient and not self.engine.shards:
            every = [p for group in optimizer.param_groups for p in group["params"]]
            self.exact = ClipBias([p for p in every if id(p) not in critic])

    def begin(self, *, rests: bool = False) -> None:
        """Drop all gradients and measurements before a mini-batch, also after an interrupted one.

        `rests`: whether it must leave the weights unchanged.
        """
        self.rests = rests
        self.losses: list[Tensor] = []
        self._weight: Tensor | None = None
        self._figures: dict[str, Tensor | float] = {}
        self._drop()
        if self.region is not None:
            self.region.start_mini_batch()

    def _drop(self) -> None:
        self.factor = 1.0
        self.critic_grads.clear()
        for part in (self.exact, self.estimate):
            if part is not None:
                part.clear()

    def add_weights(self, weights: Tensor) -> None:
        """Record a pass's episode weights, [B], to detect a gradient multiplied by 0."""
        self._weight = weights.sum() + (0.0 if self._weight is None else self._weight)

    def add_policy(self, terms: Terms) -> Tensor:
        """Measure a pass's terms, and return its loss for the backward pass.

        The loss has the gradient of -kept, and of the other terms unless these have a separate buffer. It
        has the value of -objective plus the other terms.
        """
        extra = terms.extra
        if self.estimate is not None:
            self.estimate.add(terms)
        if self.exact is not None:
            self.exact.add(terms)
            extra = None if extra is None else extra.detach()
        kept = (terms.surrogate.kept * terms.weights).sum()
        objective = (terms.surrogate.objective * terms.weights).sum()
        loss = -kept + (kept - objective).detach()
        return loss if extra is None else loss + extra

    def accumulate(self, model: nn.Module, make_loss: Callable[[], Tensor]) -> Tensor:
        """Make a pass without communication, and its backward pass; return the loss, detached."""
        with self._accelerator.no_sync(model):
            loss = make_loss()
            self._accelerator.backward(loss)
        return loss.detach()

    def set_factor(self) -> None:
        """Set the factor as far as possible before a mini-batch's last backward pass."""
        reduce, processes = self._accelerator.reduce, self._accelerator.num_processes
        if self.region is not None:
            self.region.measure(reduce, self._accelerator.device)
            self.factor *= self.region.factor
            if self.engine.steps_in_backward and self.region.exceeds:
                self.factor = 0.0
        if self.estimate is None:
            return
        kept, clipped = self.estimate.finish(reduce, processes)
        self._figures |= {
            "clip_bias/norm_estimate": clipped,
            "clip_bias/grad_norm_estimate": kept,
            "clip_bias/share_estimate": normalization_scale(kept, clipped, "share"),
        }
        if self._scaler is not None and self.exact is None:
            self._figures["clip_bias/scale"] = scale = float(self._scaler.scale(kept, clipped))
            self.factor *= scale

    def check_loss(self, loss: Tensor) -> tuple[str, bool]:
        """Check the loss of an engine that steps inside the backward pass and cannot leave a step out.

        Return what is not finite, and whether any episode weight so far is not 0.
        """
        if not self.engine.steps_in_backward:
            return "", True
        weight = torch.ones_like(loss) if self._weight is None else self._weight
        flags = torch.stack([(~loss.detach().isfinite()).long(), (weight != 0).long()])
        broken, weighs = self._accelerator.gather(flags.unsqueeze(0)).T.tolist()
        return _fault(KINDS[0], broken), any(weighs)

    def close(self, policy: Policy, *, warms_up: bool) -> StepReport:
        """End a mini-batch: reduce and clip the critic's gradient, correct the policy's; report the facts.

        Upstream clips the policy's gradient later, which would spread one NaN to all of it. `policy`: the
        policy's trained parameters, with names. `warms_up`: whether only the critic trains.
        """
        if self.critic_grads.parameters and self.critic_grads.is_empty and not self.rests:
            raise TypeError("`_compute_loss` has not trained the critic: call super().")
        # DeepSpeed has taken the policy's step already, so its gradient can no longer be checked.
        policy = () if self.engine.steps_in_backward else policy
        device, region = self._accelerator.device, self.region
        parts = self.losses, [p.grad for _, p in policy], [self.critic_grads.norm()]
        weight = torch.ones((), device=device) if self._weight is None else self._weight
        local = torch.stack([*(_broken(part, device).long() for part in parts), (weight == 0).long()])
        *columns, weightless = self._accelerator.gather(local.unsqueeze(0)).T.tolist()
        faults = [fault for fault in map(_fault, KINDS, columns) if fault]
        sound = not faults
        if sound and not self.rests:
            self._finish(policy=not warms_up)
        figures = {name: float(value) for name, value in self._figures.items()}
        # Without a scale the norm is only a diagnostic.
        norm = figures.get("clip_bias/norm", figures.get("clip_bias/norm_estimate", 0.0))
        if sound and "clip_bias/scale" in figures and not math.isfinite(norm):
            faults = ["the gradient of the clipped terms"]
        return StepReport(
            figures=figures,
            faults=", ".join(faults),
            detail=self._detail(policy) if faults else "",
            is_weightless=all(weightless),
            exceeds=region is not None and region.exceeds,
        )

    def _detail(self, policy: Policy) -> str:
        """Return what is not finite on this process; "" on a secondary process with finite losses."""
        losses = [float(loss) for loss in self.losses if not bool(loss.isfinite().all())]
        if not (losses or self._accelerator.is_main_process):
            return ""
        gradients = [(name, p.grad) for name, p in policy if p.grad is not None]
        names = [name for name, gradient in gradients if not bool(gradient.isfinite().all())]
        named = ", ".join(names[:3] + ["..."] * (len(names) > 3)) or "none"
        return f"losses {losses} of {len(self.losses)}; gradients of {named}"

    def _finish(self, *, policy: bool) -> None:
        """Reduce and clip the critic's gradient; correct the policy's gradient if `policy` is True."""
        mean = None
        if self._accelerator.num_processes > 1:
            mean = partial(self._accelerator.reduce, reduction="mean")
        if self.critic_grads.parameters:
            if mean is not None:
                self.critic_grads.reduce(mean)
            self._figures["value/grad_norm"] = self.critic_grads.clip_(self._args.max_grad_norm)
        if policy and self.exact is not None:
            factor, more = self.exact.finish(mean, self._scaler)
            self.factor *= factor
            self._figures |= more

    def apply(self, verdict: Verdict, model: nn.Module, *, ends_update: bool) -> None:
        """Keep only the gradients that the verdict admits, before the optimizer steps."""
        takes = verdict is Verdict.TAKEN
        if self.region is not None:
            refused = verdict is Verdict.REFUSED
            self.region.apply(takes=takes, refused=refused, ends_update=ends_update)
        if not takes:
            model.zero_grad(set_to_none=True)
        if self.rests or verdict not in CRITIC_STEPS:
            self._drop()


def _fault(kind: str, flags: Sequence[int]) -> str:
    """Return the name of a part that is not finite, with its processes; "" if no process has it."""
    ranks = [str(rank) for rank, flag in enumerate(flags) if flag]
    return f"{kind} (process{'es' if len(ranks) > 1 else ''} {', '.join(ranks)})" if ranks else ""


def _broken(tensors: Iterable[Tensor | None], device: torch.device) -> Tensor:
    """Return whether any tensor has a NaN, an infinity or an overflowing norm, as a 0-dim bool tensor."""
    sound = [torch.ones((), dtype=torch.bool, device=device)]
    for tensor in tensors:
        if tensor is not None:
            part = getattr(tensor, "to_local", lambda whole=tensor: whole)()
            norm = torch.linalg.vector_norm(part, dtype=_wide(part))
            sound.append(norm.isfinite().to(device))
    return ~torch.stack(sound).all()


def set_base_rate(schedule: Any, group: dict[str, Any], index: int, old: float, new: float) -> None:
    """Set a group's base learning rate, and the scheduled rate of the next optimizer step."""
    scheduler: Any = getattr(schedule, "scheduler", schedule)
    if hasattr(scheduler, "lr_lambdas"):
        rate = new * scheduler.lr_lambdas[index](scheduler.last_epoch)
    else:
        rate = float(group["lr"]) * (new / old if old else 1.0)
    if "initial_lr" in group:
        group["initial_lr"] = new
    for known, value in (("base_lrs", new), ("_last_lr", rate)):
        if hasattr(scheduler, known):
            getattr(scheduler, known)[index] = value
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
