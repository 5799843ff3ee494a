"""ST-PPO: PPO with turn-level importance ratios, and what holds its off-policy updates back."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..core import ClippedSurrogate, normalization_scale
from . import citations
from .gradients.bias_correction import ClipBiasCorrection, ClipBiasEstimate, has_dropout
from .host import is_warming_up
from .loop.batch import Batch, episode_tokens, full_sequence, take_rows
from .ppo_trainer import PPOTrainer
from .sharding.runtime import is_sharded
from .stabilizers import STABILIZERS, Stabilizer, check_linear, weighs
from .stppo_config import STPPOConfig


class STPPOTrainer(PPOTrainer):
    """Stabilised off-policy PPO for multi-turn agents.

    Takes `PPOTrainer`'s arguments with an [`STPPOConfig`]. `variant` chooses between token PPO
    (`"ppo"`), turn-level ratios (`"turn-ppo"`), stabilizers (`"s-ppo"`) and both (`"st-ppo"`).

    Source: Li et al., arXiv:2511.20718v1. The published correction of the clipping bias is known to us
    at second hand only; `docs/algorithm.md` says which parts are the paper's and which are our own.
    """

    config_class = STPPOConfig
    _tag_names = ["trl", "stppo", "reinforcement-learning", "multi-turn"]  # noqa: RUF012
    _name = "ST-PPO"
    _paper = {  # noqa: RUF012
        "title": "ST-PPO: Stabilized Off-Policy Proximal Policy Optimization for Multi-Turn Agents "
        "Training",
        "id": "2511.20718",
        "citation": citations.ST_PPO,
    }

    args: STPPOConfig
    _stabilizers: list[Stabilizer] = []  # noqa: RUF012
    _scaler: Stabilizer | None = None
    _correction: ClipBiasCorrection | None = None
    _estimate: ClipBiasEstimate | None = None
    _later: tuple[Batch, Tensor] | None = None

    @property
    def _has_estimate_only(self) -> bool:
        """Whether the norms are estimated; gradients that are sharded are nowhere to be had whole."""
        return is_sharded(self.accelerator) or not self.args.takes_second_gradient

    def _scales_updates(self) -> bool:
        return self.args.scales_updates

    def _after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self._scales_updates():
            check_linear(type(optimizer).__name__)
        self._stabilizers = [STABILIZERS[name](self.args) for name in self.args.stabilizers or ()]
        self._run_state.stabilizers = self._stabilizers
        self._scaler = next((each for each in self._stabilizers if each.scales), None)
        if not self.args.measures_clip_bias:
            return
        self._estimate = ClipBiasEstimate(self.accelerator.device)
        if self._has_estimate_only:
            return
        critic = {id(p) for p in self.critic.parameters()}
        groups = optimizer.param_groups
        self._correction = ClipBiasCorrection(
            [p for group in groups for p in group["params"] if id(p) not in critic],
            repeatable=not has_dropout(self.model),
        )

    def _start_mini_batch(self, *, empty: bool = False) -> None:
        super()._start_mini_batch(empty=empty)
        self._later = None
        for bias in (self._correction, self._estimate):
            if bias is not None:
                bias.clear()

    def _stabilise(
        self,
        inputs: Batch,
        surrogate: ClippedSurrogate,
        weights: Tensor,
        logprobs: Tensor,
        entropies: Tensor,
    ) -> ClippedSurrogate:
        """Weigh the episodes; the estimate of the norms sees them weighted."""
        loss_mask = inputs["loss_mask"]
        if self.args.weighs_episodes:
            weighing = [each for each in self._stabilizers if weighs(type(each))]
            factors = [each.episode_weights(inputs["advantages"], loss_mask) for each in weighing]
            trust = torch.stack(factors).prod(dim=0)
            surrogate = surrogate.weighted(trust)
            if not (self.args.beta or self.args.entropy_coef or self.aux_loss_enabled):
                self._guards.add_weights(trust)
            self._mini_batches.metrics.add_episode_weights(trust, loss_mask.any(dim=1))
        if self._estimate is not None:
            self._estimate.observe(surrogate, weights, logprobs, entropies, loss_mask)
            # The last micro-batch: DeepSpeed steps inside its backward pass.
            if self.accelerator.sync_gradients:
                self._finish_estimate(self._estimate)
        return surrogate

    def _combine(
        self, inputs: Batch, surrogate: ClippedSurrogate, weights: Tensor, extra: Tensor | None
    ) -> Tensor:
        if self._correction is not None:
            later = self._correction.observe(surrogate, weights, extra, episode_tokens(inputs))
            if later is not None:
                rows, coefficient = later
                self._later = take_rows(inputs, rows), coefficient
            extra = None if extra is None else extra.detach()
        return super()._combine(inputs, surrogate, weights, extra)

    def _finish_estimate(self, estimate: ClipBiasEstimate) -> None:
        """Log what the estimate says; where there is nothing better, scale the step by it."""
        kept, clipped = estimate.finish(self.accelerator.reduce, self.accelerator.num_processes)
        share = normalization_scale(kept, clipped, "share")
        metrics: dict[str, Tensor | float] = {
            "estimated_share": share,
            "is_estimate": float(self._has_estimate_only),
        }
        if self._has_estimate_only:
            scale = 1.0 if self._scaler is None else self._scaler.scale(kept, clipped)
            metrics |= {"norm": clipped, "grad_norm": kept, "share": share, "scale": scale}
            if self._scales_updates():
                self._optimizers.scale_update(float(scale))
        for name, value in metrics.items():
            self._mini_batches.metrics.add_scalar(f"clip_bias/{name}", value)

    def _after_backward(self) -> None:
        """The bias of a few episodes, from a pass through them alone."""
        if self._correction is None or self._later is None:
            return
        (inputs, coefficient), self._later = self._later, None
        ids, mask, length = full_sequence(inputs)
        logprobs, _, _ = self._get_per_token_logps_and_entropies(self.model, ids, mask, length)
        self._correction.add(-(coefficient * self._log_ratio(inputs, logprobs)).sum())

    def _before_optimizer_step(self) -> None:
        super()._before_optimizer_step()
        if self._correction is None or is_warming_up(self):
            return
        distributed = self.accelerator.num_processes > 1
        factor, figures = self._correction.finish(
            partial(self.accelerator.reduce, reduction="mean") if distributed else None,
            self._scaler,
        )
        self._optimizers.scale_update(factor)
        for name, value in figures.items():
            self._mini_batches.metrics.add_scalar(name, value)
