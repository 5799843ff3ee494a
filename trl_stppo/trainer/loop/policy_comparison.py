"""The policy that sampled the episodes, and what it is compared with: reference and sampler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...core import kl_penalty, sampler_correction
from .._trl import disable_gradient_checkpointing, use_adapter
from ..host import Host
from .batch import Batch, full_sequence
from .forward import Logprobs


class PolicyComparison:
    """Adds the log-probabilities of a rollout batch to it, and says how far they are apart."""

    def __init__(self, host: Host, logprobs: Callable[..., Logprobs]) -> None:
        self._host, self._logprobs = host, logprobs

    def add_old(self, batch: Batch) -> None:
        """Log-probabilities of the tokens when they were sampled, where anything is compared with them.

        Where an optimizer step takes in all of a rollout, the policy has not moved before its update.
        """
        host, args = self._host, self._host.args
        per_rollout = (args.steps_per_generation or 1) * host.num_iterations
        moves = args.gradient_accumulation_steps % per_rollout
        if moves or self._corrects_sampler or args.kl_coef != 0.0 or args.rollout_staleness:
            batch["old_per_token_logps"] = self.under(host.model, batch)

    def add_reference(self, batch: Batch) -> None:
        """Those of the reference policy, where a KL is measured."""
        host = self._host
        if host.args.kl_coef == 0.0 and host.args.beta == 0.0:
            return
        if host.ref_model is not None:
            batch["ref_per_token_logps"] = self.under(host.ref_model, batch)
            return
        policy = host.accelerator.unwrap_model(host.model)
        # A fresh adapter is switched off; of one that has learnt, upstream or we have made a copy.
        with use_adapter(policy, adapter_name="ref" if "ref" in policy.peft_config else None):
            batch["ref_per_token_logps"] = self.under(host.model, batch)

    def under(self, model: nn.Module, batch: Batch) -> Tensor:
        """Log-probabilities of a batch's tokens under a model, [B, T] nats, without a gradient."""
        ids, mask, length = full_sequence(batch)
        args = self._host.args
        kwargs, size = args.gradient_checkpointing_kwargs, args.per_device_train_batch_size
        with torch.no_grad(), disable_gradient_checkpointing(self._host.model, kwargs):
            logprobs, _, _ = self._logprobs(model, ids, mask, length, batch_size=size)
        return logprobs

    @property
    def _corrects_sampler(self) -> bool:
        return self._host.use_vllm and self._host.vllm_importance_sampling_correction

    def add_sampler_weights(self, batch: Batch) -> None:
        """Constant weights for the gap between the policy and the engine that sampled for it."""
        if not self._corrects_sampler:
            return
        args = self._host.args
        level, form = args.vllm_importance_sampling_mode.split("_")
        batch["importance_sampling_ratio"] = sampler_correction(
            batch["old_per_token_logps"],
            batch["sampling_per_token_logps"],
            batch["turn_index"],
            "product" if level == "sequence" else level,  # TRL's, of the whole episode
            truncate=form == "truncate",
            clip_min=args.vllm_importance_sampling_clip_min,
            clip_max=args.vllm_importance_sampling_clip_max,
        )

    def kl_to_reference(self, batch: Batch) -> Tensor | None:
        """Per-token KL that goes into the reward, [B, T] nats; None without one."""
        args = self._host.args
        if args.kl_coef == 0.0:
            return None
        return kl_penalty(
            batch["old_per_token_logps"],
            batch["ref_per_token_logps"],
            args.kl_estimator,
            loss_mask=batch["turn_index"] >= 0,
        )

    def token_factors(self, batch: Batch, logprobs: Tensor) -> Tensor | None:
        """Constant factors on kept and clipped terms alike: sampler correction, off-policy mask.

        `logprobs`: [B, T] nats, of the policy as it is now.
        """
        weights = batch.get("importance_sampling_ratio")
        threshold = self._host.args.off_policy_mask_threshold
        if threshold is None:
            return weights
        old = batch.get("old_per_token_logps", logprobs.detach())
        sampled, mask = batch.get("sampling_per_token_logps", old), batch["loss_mask"]
        keep = self._host.get_off_policy_mask(
            batch["advantages"], logprobs, sampled, mask.to(logprobs.dtype), threshold
        )
        return (keep if weights is None else weights * keep).detach()
