"""Prototypes: STPPOTrainer with any of the study's corrections, as hooks around what it does anyway.

A rival is named by its parts, joined by `+`, on turn ratios: "episodes+share". The parts are those of
`PARTS` and of `_rivals_math.kernel_terms`; a number belongs to what stands before it, as in "kl-0.01".
"""

from __future__ import annotations

import math
from typing import Any

import _rivals_math as rival
import torch
from _stability_grid import SUCCESS
from torch import Tensor, nn

from trl_stppo import STPPOTrainer
from trl_stppo.core import ClippedSurrogate, token_gae, whiten
from trl_stppo.trainer.batch import Batch, Targets, join
from trl_stppo.trainer.training_loop import TrainingLoop

KERNELS = ("sapo", "cispo", "vespo", "tis", "topr")
PARTS = {  # part -> what it changes
    "turn": "nothing: the ratio alone",
    "token": "the ratio is of tokens",
    "share": "the step, by (g / (g + C))^4 of exact norms",
    "share-logits": "the same, of norms in the space of the logits",
    "episodes": "weights per episode",
    "turns": "weights per turn",
    "winners": "which episodes train: those whose advantages add up to more than nothing",
    "vtrace": "advantages and targets, by V-trace over turns, anew every epoch",
    "vtrace-mean": "the same with geometric means",
    "turn-gae": "advantages, by GAE over turns, once",
    "token-gae": "advantages and targets, by GAE over tokens, anew every epoch",
    "critic-lambda": "the critic's targets, by lambda 1",
    "mask": "which turns train: the trust region, in place of the clip",
    "m2po": "which turns train: the second moment, in place of the clip",
    "decoupled": "the anchor: the policy at the start of the update, with the player in weights",
    "ess": "the step, by the effective share of episodes",
    "ess-turns": "the step, by that of turns",
    "kl": "the learning rate, towards this KL",
    "target-kl": "when the update ends",
}
RATES = (1e-5, 1e-2)  # bounds of "kl"
DELTA = 0.2  # of "mask"
CREDIT = tuple(
    f"credit/{estimate}"
    for estimate in ("token GAE", "turn GAE", "return less value", "return less mean", "value")
)
FIGURES = (
    *("study/movement", "study/scale", "study/weight_mean", "study/weight_min"),
    "study/weight_losers",
    *("study/ess_episodes", "study/ess_turns", "study/divergence", "study/token_kl"),
    *CREDIT,
)


def parts_of(arm: str) -> dict[str, float | None]:
    """Parts and their numbers.

    Raises:
        ValueError: there is no such part.
    """
    parts: dict[str, float | None] = {}
    for word in arm.split("+"):
        name, _, number = word.rpartition("-")
        if number.replace(".", "").isdigit():
            parts[name] = float(number)
        else:
            parts[word] = None
    if unknown := set(parts) - {*PARTS, *KERNELS}:
        raise ValueError(f"{arm!r}: there is no {sorted(unknown)}; parts are {[*PARTS, *KERNELS]}")
    return parts


def settings_of(arm: str) -> dict[str, Any]:
    """What the parts set of the trainer's own configuration."""
    parts = parts_of(arm)
    shares = "share" in parts or "share-logits" in parts
    return {
        "stabilizers": "share" if shares else "none",
        "clip_bias_estimator": "logits" if "share-logits" in parts else "exact" if shares else None,
        "advantage_level": "turn" if "turn-gae" in parts else "token",
        "target_kl": parts.get("target-kl"),
    }


class RivalLoop(TrainingLoop):
    """The training loop with a rival's parts, which the trainer names."""

    def __init__(self, host: Any, *args: Any, **parts: Any) -> None:
        super().__init__(host, *args, **parts)
        self._arm, self._base = host.arm, host.base
        self._factor, self._before, self.movements = 1.0, [], []  # type: ignore[var-annotated]
        self._drifts: list[tuple[Tensor, Tensor, Tensor]] = []

    # --------------------------------------------------------------- advantages and targets

    @property
    def _reestimates(self) -> bool:
        return bool({"vtrace", "vtrace-mean", "token-gae"} & set(self._arm))

    def micro_batch(self, play: Any) -> Batch:
        """Advantages and targets anew in every epoch, where a part asks for it."""
        internals, steps = self.host.internals, int(self.args.steps_per_generation or 1)
        iterations = steps * self.host.num_iterations
        later_epoch = internals.step % steps == 0 and internals.step % iterations
        if self._reestimates and later_epoch and internals.buffer:
            with torch.no_grad():
                batch = join(internals.buffer)
                values, _ = self.rollout_values(batch)
                raw, returns = self._estimated(batch, values)
                batch["values"], batch["returns"] = values, returns
                batch["advantages"] = self._whitened(raw, batch)
            internals.buffer = [batch]
        return super().micro_batch(play)

    def targets(self, batch: Batch, *args: Any) -> Targets:
        """The present policy's part is here: the policy that has played is gone."""
        first = super().targets(batch, *args)
        if "decoupled" in self._arm:
            batch["proximal_logps"] = self.logprobs_under(self.host.model, batch)  # type: ignore[typeddict-unknown-key]
        if "critic-lambda" in self._arm:
            mask = batch["turn_index"] >= 0
            _, returns = token_gae(first.rewards, first.values, mask, self.args.gamma, 1.0)
            return Targets(**{**vars(first), "returns": returns})
        if not self._reestimates:
            return first
        batch["rewards"] = first.rewards  # type: ignore[typeddict-unknown-key]
        raw, returns = self._estimated(batch, first.values)
        mask = batch["loss_mask"]
        if "token-gae" not in self._arm:
            index = batch["turn_index"]
            mask = mask & (index != torch.nn.functional.pad(index[:, :-1], (1, 0), value=-1))
        return Targets(first.rewards, raw, self._whitened(raw, batch), first.values, returns, mask)

    def _estimated(self, batch: Batch, values: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and targets, from these values and the present policy."""
        rewards, index = batch["rewards"], batch["turn_index"]  # type: ignore[typeddict-item]
        factors = self.args.gamma, self.args.lam
        if "token-gae" in self._arm:
            return token_gae(rewards, values, index >= 0, *factors)
        drift = self.logprobs_under(self.host.model, batch) - batch["old_per_token_logps"]
        mean = "vtrace-mean" in self._arm
        return rival.vtrace(rewards, values, drift, index, *factors, mean=mean)

    def _whitened(self, raw: Tensor, batch: Batch) -> Tensor:
        mask = batch["loss_mask"]
        return whiten(raw, mask, reduce=self.accelerator.reduce).masked_fill(~mask, 0.0)

    # ------------------------------------------------------------------------ terms of a step

    def policy_loss(self, model: nn.Module, inputs: Batch) -> Tensor:
        """Keeps the micro-batch."""
        self._inputs = inputs
        return super().policy_loss(model, inputs)

    def log_ratio(self, inputs: Batch, logprobs: Tensor) -> Tensor:
        """To the anchor, where there is one."""
        if "decoupled" in self._arm:
            proximal = inputs["proximal_logps"]  # type: ignore[typeddict-item]
            inputs = {**inputs, "old_per_token_logps": proximal}  # type: ignore[assignment]
        self._level = super().log_ratio(inputs, logprobs)
        return self._level

    def token_factors(self, batch: Batch, logprobs: Tensor) -> Tensor | None:
        """Weights of the player, where there is an anchor."""
        if "decoupled" in self._arm:
            return self._behaviour_weights(batch)
        return super().token_factors(batch, logprobs)

    def _behaviour_weights(self, inputs: Batch) -> Tensor:
        proximal = inputs["proximal_logps"]  # type: ignore[typeddict-item]
        return rival.behaviour_weights(proximal, inputs["old_per_token_logps"], self._index(inputs))

    def _index(self, inputs: Batch) -> Tensor:
        return inputs["turn_index"].masked_fill(~inputs["loss_mask"], -1)

    def weigh_episodes(
        self,
        inputs: Batch,
        surrogate: ClippedSurrogate,
        share: Tensor,
        logprobs: Tensor,
        entropies: Tensor,
    ) -> ClippedSurrogate:
        """With the part's terms and weights."""
        surrogate = self._in_place_of(surrogate, logprobs)
        self._watch(logprobs)
        if {"episodes", "turns", "winners"} & set(self._arm):
            mask = inputs["loss_mask"]
            weights = self._weights(surrogate, share, logprobs, entropies, mask)
            surrogate = surrogate._replace(kept=surrogate.kept * weights.to(surrogate.kept.dtype))
        return super().weigh_episodes(inputs, surrogate, share, logprobs, entropies)

    def _in_place_of(self, surrogate: ClippedSurrogate, logprobs: Tensor) -> ClippedSurrogate:
        """The clipped surrogate, or what a part has instead of the clip."""
        old, advantages = self._inputs["old_per_token_logps"], self._inputs["advantages"]
        index = self._index(self._inputs)
        for name in KERNELS:
            if name in self._arm:
                terms = rival.kernel_terms(name, logprobs, old, advantages, index)
                nothing = torch.zeros_like(surrogate.is_clipped)
                return surrogate._replace(
                    kept=terms, clipped=torch.zeros_like(terms), is_clipped=nothing
                )
        if "mask" in self._arm:
            gone = rival.outside_trust_region(logprobs, old, advantages, index, DELTA)
        elif "m2po" in self._arm:
            gone = rival.beyond_second_moment(logprobs - old, index)
        else:
            return surrogate
        terms = surrogate.kept + surrogate.clipped
        return surrogate._replace(
            kept=terms.masked_fill(gone, 0.0),
            clipped=terms.masked_fill(~gone, 0.0),
            is_clipped=gone & (advantages != 0),
        )

    def _weights(
        self,
        surrogate: ClippedSurrogate,
        share: Tensor,
        logprobs: Tensor,
        entropies: Tensor,
        loss_mask: Tensor,
    ) -> Tensor:
        winners = rival.winners(self._inputs["advantages"], loss_mask)
        if "winners" in self._arm:
            return winners
        squares = []
        for terms in (surrogate.kept, surrogate.clipped):
            (coefficient,) = torch.autograd.grad((terms * share).sum(), logprobs, retain_graph=True)
            squares.append(rival.token_squares(coefficient, logprobs, entropies, loss_mask))
        if "turns" in self._arm:
            weights = rival.turn_weights(*squares, self._index(self._inputs))
            counted = weights[loss_mask]
        else:
            weights = rival.episode_weights(*squares)
            counted = weights[loss_mask.any(dim=1)]
            if (losers := (winners == 0) & loss_mask.any(1, keepdim=True)).any():
                self.metrics.add_scalar("study/weight_losers", weights[losers].mean())
        if counted.numel():
            self.metrics.add_scalar("study/weight_mean", counted.mean())
            self.metrics.add_scalar("study/weight_min", counted.min())
        return weights

    # --------------------------------------------------------------------- size of the step

    def start_mini_batch(self, *, empty: bool = False) -> None:
        """Forgets the drifts."""
        super().start_mini_batch(empty=empty)
        self._drifts = []

    def _watch(self, logprobs: Tensor) -> None:
        """Take in a micro-batch's drift away from the player."""
        inputs, index = self._inputs, self._index(self._inputs)
        inside = index >= 0
        now = logprobs.detach().masked_fill(~inside, 0.0)
        old = inputs["old_per_token_logps"].masked_fill(~inside, 0.0)
        drift = now - old
        turns = rival.turn_means(drift, index)[rival.turn_counts(index) > 0]
        self._drifts.append((drift.sum(1)[inside.any(1)], turns, drift[inside]))
        figures = self.metrics
        figures.add_scalar("study/divergence", (now.exp() - old.exp()).abs().max())

    def _before_step(self) -> None:
        """Scales the step as the part says."""
        super()._before_step()
        if not self._drifts:
            return
        episodes, turns, tokens = (torch.cat(d) for d in zip(*self._drifts, strict=True))
        token_kl = float((tokens.exp() - 1.0 - tokens).mean()) if tokens.numel() else 0.0
        shares = [float(rival.effective_share(drift)) for drift in (episodes, turns)]
        scale = None
        for name, share in zip(("ess", "ess-turns"), shares, strict=True):
            if name in self._arm:
                scale = rival.share_scale(share, self._arm[name] or self._base)
        target = self._arm.get("kl")
        if target is not None:
            bounds = [rate / self.args.learning_rate for rate in RATES]
            kl = token_kl if math.isfinite(token_kl) else math.inf
            scale = self._factor = rival.adapted(self._factor, kl, target, *bounds)
        if scale is not None:
            self.optimizers.scale_step(scale)
            self.metrics.add_scalar("study/scale", scale)
        for name, value in zip(("ess_episodes", "ess_turns"), shares, strict=True):
            self.metrics.add_scalar(f"study/{name}", value)
        self.metrics.add_scalar("study/token_kl", token_kl)

    # -------------------------------------------------------------------------- movement

    def rollout(self, rows: Any) -> Batch:
        """Marks where the policy is."""
        self.mark()
        return super().rollout(rows)

    def mark(self) -> None:
        """How far, in the L2 norm, the policy has moved since the last rollout batch."""
        now = [p.detach().clone() for p in self.host.model.parameters() if p.requires_grad]
        if self._before:
            squares = [
                (a - b).double().square().sum() for a, b in zip(now, self._before, strict=True)
            ]
            self.movements.append(float(torch.stack(squares).sum().sqrt()))
        self._before = now


class RivalTrainer(STPPOTrainer):
    """STPPOTrainer with a rival's parts.

    Args:
        arm: the rival.
        base: effective share at which a step is whole, of "ess" and "ess-turns".
    """

    loop_class = RivalLoop

    def __init__(self, *args: Any, arm: str, base: float = 1.0, **kwargs: Any) -> None:
        self.arm, self.base = parts_of(arm), base
        super().__init__(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As ever; afterwards the log's lines say how far each update has moved the policy."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self._loop.mark()
            lines = [line for line in self.state.log_history if SUCCESS in line]
            for line, movement in zip(lines, self._loop.movements, strict=False):
                line["study/movement"] = movement
