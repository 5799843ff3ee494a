"""What stands at observation and padding tokens changes nothing: no loss, gradient or advantage."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.kit.microbatch import captured, loss_and_gradient, value_loss_and_gradient
from tests.kit.tiers import quick
from trl_stppo.trainer import training_loop
from trl_stppo.trainer.training_loop import TrainingLoop

POISON = [1e3, -1e3, math.nan, math.inf]
PER_TOKEN = (
    "advantages", "returns", "values", "old_per_token_logps", "ref_per_token_logps",
    "sampling_per_token_logps", "importance_sampling_ratio",
)  # fmt: skip
VARIED = {
    "every term": {"beta": 0.3, "entropy_coef": 0.1, "off_policy_mask_threshold": 0.02},
    "turn ratio": {"variant": "turn-ppo"},
    "sequence ratio": {"variant": None, "importance_sampling_level": "sequence"},
    "turn advantages": {"advantage_level": "turn", "loss_type": "bnpo"},
}


def poisoned(batch, poison):
    """The batch with `poison` wherever the policy has not sampled."""
    outside = batch["turn_index"] < 0
    assert outside.any(dim=1).all()
    assert outside.sum() > (batch["completion_mask"] == 0).sum(), "observations, not only padding"
    return {
        key: value.masked_fill(outside, poison) if key in PER_TOKEN else value for key, value in batch.items()
    }


def filled(trainer, batch):
    """The batch with every per-token tensor that an option can bring."""
    noise = torch.rand(batch["loss_mask"].shape, generator=torch.manual_seed(0)).double()
    batch = {**batch, "importance_sampling_ratio": 0.5 + noise}
    batch["sampling_per_token_logps"] = batch["old_per_token_logps"] + 0.1 * noise
    assert set(PER_TOKEN) <= set(batch)
    return batch


@pytest.mark.parametrize(
    ("case", "poison"), quick(product(VARIED, POISON), *zip(VARIED, POISON, strict=True))
)
def test_poison_at_observations_leaves_losses_and_gradients_alone(case, poison, tmp_path):
    trainer, batch = captured(tmp_path, **{"kl_coef": 0.05, **VARIED[case]})
    batch = filled(trainer, batch)
    bad = poisoned(batch, poison)
    for measure in (loss_and_gradient, value_loss_and_gradient):
        value, grad = measure(trainer, batch)
        other_value, other_grad = measure(trainer, bad)
        assert torch.equal(value, other_value)
        assert torch.equal(grad, other_grad)
        assert grad.norm() > 0


IN_ROLLOUTS = [{}, {"advantage_level": "turn"}, {"whiten_rewards": True, "kl_estimator": "k3"}]


@pytest.mark.parametrize(
    ("options", "poison"),
    quick(product(IN_ROLLOUTS, POISON), ({}, 1e3), *zip(IN_ROLLOUTS, POISON[1:], strict=True)),
)
def test_poison_during_the_rollout_leaves_advantages_and_returns_alone(
    options, poison, tmp_path, monkeypatch
):
    """Values and logprobs that a model gives to observation tokens."""
    options = {"kl_coef": 0.05, "staleness": 0, **options}
    trainer, clean = captured(tmp_path, **options)
    figures = dict(trainer._metrics["train"])
    outside = clean["turn_index"] < 0

    original = TrainingLoop.rollout_values

    def values(self, batch):
        before, after = original(self, batch)
        return before.masked_fill(outside, poison), after

    original_kl = training_loop.reference_kl

    def kl(passes, turns, args):
        original_kl(passes, turns, args)
        old, ref = passes.old.masked_fill(outside, poison), passes.ref.masked_fill(outside, -poison)
        return original_kl(replace(passes, old=old, ref=ref), turns, args)

    monkeypatch.setattr(TrainingLoop, "rollout_values", values)
    monkeypatch.setattr(training_loop, "reference_kl", kl)
    trainer, bad = captured(tmp_path, **options)
    mask = clean["loss_mask"]
    assert torch.equal(bad["turn_index"], clean["turn_index"])
    assert torch.equal(bad["advantages"], clean["advantages"])
    assert torch.equal(bad["returns"][mask], clean["returns"][mask])
    assert clean["advantages"][mask].std() > 0.1
    for name in ("objective/kl", "advantage/std", "value/return_mean", "value/explained_variance"):
        assert trainer._metrics["train"][name] == figures[name], name
