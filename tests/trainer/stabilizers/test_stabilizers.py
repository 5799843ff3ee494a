"""`stabilizers`: what each does to a step through `train()`, alone and together, and what is logged of it."""

import math

import pytest
import torch

from tests.kit.loss_reference import LossReference
from tests.kit.scripted import assert_same, logged, train
from trl_stppo.trace.files import read_trace

SPLITS = {"1x8": (1, 8), "2x4": (2, 4), "8x1": (8, 1)}


def winners_of(batch) -> list[float]:
    """1 where the advantages of an episode's tokens add up to more than nothing."""
    rows = zip(batch["advantages"], batch["loss_mask"], strict=True)
    return [float(math.fsum(advantages[mask].tolist()) > 0) for advantages, mask in rows]


def split_into(split) -> dict[str, int]:
    rows, steps = SPLITS[split]
    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps}


@pytest.mark.long
@pytest.mark.parametrize(
    ("split", "variant", "loss_type"),
    [("1x8", "st-ppo", "bnpo"), ("2x4", "st-ppo", "grpo"), ("8x1", "s-ppo", "bnpo")],
)
def test_the_gradient_is_that_of_the_weighted_episodes(split, variant, loss_type, tmp_path):
    trainer, recorder = train(
        tmp_path,
        variant=variant,
        stabilizers=["winners"],
        loss_type=loss_type,
        entropy_coef=0.1,
        **split_into(split),
    )
    batch = recorder.batches[0]
    reference = LossReference(batch, trainer.importance_sampling_level, loss_type)
    weights = winners_of(batch)
    assert 0 < sum(weights) < len(weights)
    objective = sum(w * part for w, part in zip(weights, reference.clipped_of, strict=True))
    assert_same(recorder.grads[0], reference.grad(-objective - 0.1 * reference.entropy), 1e-9)
    mean = sum(weights) / len(weights)
    assert logged(trainer, "policy/episode_weight_mean") == pytest.approx([mean], rel=1e-9)
    assert logged(trainer, "policy/episode_weight_min") == pytest.approx([min(weights)], abs=1e-9)


def test_the_loss_that_is_logged_is_not_weighted(tmp_path):
    plain, _ = train(tmp_path / "plain", variant="ppo")
    weighted, _ = train(tmp_path / "winners", stabilizers=["winners"])
    for name in ("loss", "policy/clip_fraction", "policy/approx_kl", "policy/entropy"):
        assert logged(weighted, name) == pytest.approx(logged(plain, name), rel=1e-9), name


@pytest.mark.parametrize("estimator", ["exact", "logits"])
def test_share_is_of_the_weighted_kept_and_the_whole_clipped_terms(estimator, tmp_path):
    options = {"clip_bias_estimator": estimator, "variant": "st-ppo"}
    plain, _ = train(tmp_path / "plain", stabilizers=["share"], **options)
    trainer, recorder = train(tmp_path / "both", stabilizers=["winners", "share"], **options)
    end = "_estimate" * (estimator == "logits")
    norms = [logged(run, f"clip_bias/norm{end}")[0] for run in (plain, trainer)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-12)
    g, c = (logged(trainer, f"clip_bias/{name}{end}")[0] for name in ("grad_norm", "norm"))
    assert g < 0.95 * logged(plain, f"clip_bias/grad_norm{end}")[0]
    assert logged(trainer, "clip_bias/scale") == pytest.approx([g / (g + c)], rel=1e-9)
    if estimator == "exact":
        batch = recorder.batches[0]
        reference = LossReference(batch, "turn")
        parts = zip(winners_of(batch), reference.clipped_of, strict=True)
        expected = reference.grad(sum(w * part for w, part in parts))
        total = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
        assert g == pytest.approx(total.item(), rel=1e-9)


def test_without_a_stabilizer_no_weight_is_logged(tmp_path):
    trainer, _ = train(tmp_path, variant="turn-ppo")
    assert not logged(trainer, "policy/episode_weight_mean")


@pytest.mark.parametrize(
    ("stabilizers", "exact"), [(["share"], 0), (["winners", "share"], 0), (["triggered"], 1)]
)
def test_only_who_needs_exact_norms_gets_them(stabilizers, exact, tmp_path):
    options = {"stabilizers": stabilizers, "clip_bias_estimator": None, "max_grad_norm": 1.0}
    trainer, _ = train(tmp_path, variant="st-ppo", **options)
    assert len(logged(trainer, "clip_bias/norm")) == exact
    assert len(logged(trainer, "clip_bias/norm_estimate")) == 1
    weighs = "winners" in stabilizers
    assert logged(trainer, "policy/episode_weight_min") == ([0.0] if weighs else [])


@pytest.mark.parametrize("staleness", [0.0, None])
def test_the_largest_change_of_a_token_against_a_loop(staleness, tmp_path):
    options = {} if staleness is None else {"staleness": staleness}
    trainer, recorder = train(tmp_path, variant="turn-ppo", **split_into("2x4"), **options)
    batch, largest = recorder.batches[0], 0.0
    reference = LossReference(batch, "turn")
    for b, mask in enumerate(batch["loss_mask"]):
        new, old = reference.logprobs[b].detach(), batch["old_per_token_logps"][b]
        where = mask.nonzero().flatten().tolist()
        largest = max([largest, *(abs(new[t].exp() - old[t].exp()).item() for t in where)])
    assert (largest > 0.01) is (staleness is None)
    assert logged(trainer, "policy/divergence_max") == pytest.approx([largest], rel=1e-9, abs=1e-12)


def test_the_trace_holds_each_episodes_weight(tmp_path):
    for name, options, weights in (
        ("winners", {"stabilizers": ["winners"]}, {0.0, 1.0}),
        ("plain", {"variant": "turn-ppo"}, {None}),
    ):
        train(tmp_path / name, trace_episodes=8, **options)
        assert {episode.weight for episode in read_trace(tmp_path / name)} == weights
