"""The trainer's g, C and s are those of the whole mini-batch, whatever it is split into."""

import math
from itertools import product

import pytest
import torch

from tests.kit.fakes import char_tokenizer, float64_policy
from tests.kit.loss_reference import LossReference
from tests.kit.scripted import assert_same, logged, norm, train
from tests.kit.tiers import quick
from trl_stppo import STPPOTrainer

FIGURES = ("norm", "grad_norm", "scale", "cosine")
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
SPLITS = {"1x8": (1, 8), "2x4": (2, 4), "8x1": (8, 1)}


def figures(trainer) -> dict[str, list[float]]:
    return {name: logged(trainer, f"clip_bias/{name}") for name in FIGURES}


@pytest.mark.parametrize(
    ("variant", "loss_type"),
    quick(
        product(["s-ppo", "st-ppo"], LOSS_TYPES),
        *zip(["s-ppo", "st-ppo"] * 2, LOSS_TYPES, strict=True),
    ),
)
def test_bias_gradient_and_cosine_equal_an_independent_computation(variant, loss_type, tmp_path):
    trainer, recorder = train(
        tmp_path, variant=variant, loss_type=loss_type, max_completion_length=64,
        per_device_train_batch_size=2, gradient_accumulation_steps=4,
    )  # fmt: skip
    level = trainer.importance_sampling_level
    assert level == ("turn" if variant == "st-ppo" else "token")
    reference = LossReference(recorder.batches[0], level, loss_type)
    g, bias = reference.g, reference.bias
    # .grad holds the gradient of the loss, which is minus the objective's.
    assert_same(recorder.grads[0], {name: -grad for name, grad in g.items()})
    dot = sum((g[name] * bias[name]).sum().item() for name in g)
    expected = {
        "norm": norm(bias),
        "grad_norm": norm(g),
        "cosine": dot / norm(g) / norm(bias),
        "scale": norm(g) / (norm(g) + norm(bias)),
    }
    assert expected["norm"] > 0.1 * expected["grad_norm"], "the case should be interesting"
    for name, value in expected.items():
        assert logged(trainer, f"clip_bias/{name}") == pytest.approx([value], rel=1e-9), name


def test_each_step_measures_its_own_bias(tmp_path):
    """Nothing is carried over: C, g and the extra terms of an epoch are those of its weights."""
    trainer, recorder = train(
        tmp_path, num_ppo_epochs=3, max_steps=3, learning_rate=1.0, beta=0.3, entropy_coef=0.2,
        per_device_train_batch_size=4, gradient_accumulation_steps=2,
    )  # fmt: skip
    for step in range(3):
        weights = recorder.after[step - 1] if step else recorder.before
        policy = {n.removeprefix("policy/"): w for n, w in weights.items() if n[0] == "p"}
        reference = LossReference(recorder.batches[step], weights=policy)
        assert figures(trainer)["norm"][step] == pytest.approx(norm(reference.bias), rel=1e-9)
        assert figures(trainer)["grad_norm"][step] == pytest.approx(norm(reference.g), rel=1e-9)
        extra = 0.3 * reference.kl - 0.2 * reference.entropy
        assert_same(recorder.grads[step], reference.grad(extra - reference.clipped))


@pytest.mark.parametrize("loss_type", quick(LOSS_TYPES, "dapo"))
def test_the_split_into_micro_batches_changes_nothing(loss_type, tmp_path):
    """Two mini-batches, two epochs: four steps, each with its own g, C and s."""
    options = {
        "loss_type": loss_type, "rows": 16, "num_mini_batches": 2, "num_ppo_epochs": 2,
        "max_steps": 4, "learning_rate": 1.0, "entropy_coef": 0.01, "beta": 0.1,
    }  # fmt: skip
    runs = {}
    for name, (size, steps) in SPLITS.items():
        trainer, recorder = train(
            tmp_path / name,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=2 * steps,
            **options,
        )
        assert len(recorder.after) == 4
        runs[name] = (figures(trainer), logged(trainer, "loss"), recorder)
    expected, losses, recorder = runs.pop("8x1")
    assert min(expected["norm"]) > 0.0
    for other, other_losses, other_recorder in runs.values():
        for name in FIGURES:
            assert other[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-12), name
        # The losses are summed in float32.
        assert other_losses == pytest.approx(losses, rel=1e-6, abs=1e-6)
        for step in range(4):
            for part in ("policy", "critic"):
                assert_same(other_recorder.moved(part, step), recorder.moved(part, step), 1e-8)
            assert_same(other_recorder.grads[step], recorder.grads[step], 1e-8)


def test_the_fused_head_measures_the_same_bias(tmp_path):
    fused, _ = train(tmp_path / "fused", trainer_class=STPPOTrainer)
    plain, _ = train(tmp_path / "plain")
    for name in FIGURES:
        assert figures(fused)[name] == pytest.approx(figures(plain)[name], rel=1e-5, abs=1e-6)


def test_before_the_first_step_the_bias_is_exactly_zero_and_the_step_is_ppos(tmp_path):
    options = {"staleness": 0.0, "num_ppo_epochs": 2, "max_steps": 2, "learning_rate": 3.0}
    corrected, one = train(tmp_path / "s-ppo", variant="s-ppo", **options)
    _, other = train(tmp_path / "ppo", variant="ppo", **options)
    result = figures(corrected)
    assert result["norm"][0] == 0.0
    assert result["scale"][0] == 1.0
    assert result["cosine"][0] == 0.0
    for name, weight in other.after[0].items():
        assert torch.equal(one.after[0][name], weight), name
    # The second epoch is off-policy, and there the two part.
    assert result["norm"][1] > 0.0
    assert result["scale"][1] < 1.0
    assert not torch.equal(one.after[1]["policy/lm_head.weight"], other.after[1]["policy/lm_head.weight"])


@pytest.mark.parametrize("level", quick(["token", "turn"], "turn"))
def test_measuring_without_correcting_leaves_the_run_unchanged(level, tmp_path):
    options = {"variant": "ppo" if level == "token" else "turn-ppo"}
    options |= {"num_ppo_epochs": 2, "max_steps": 2}
    measured, one = train(tmp_path / "measured", clip_bias_estimator="exact", **options)
    estimated, other = train(tmp_path / "estimated", **options)
    assert logged(measured, "clip_bias/norm")[0] > 0
    assert logged(measured, "clip_bias/scale") == [1.0] * 2
    # The estimate is part of every run, and equal beside the exact norms.
    assert logged(estimated, "clip_bias/norm") == logged(estimated, "clip_bias/scale") == []
    share = logged(measured, "clip_bias/share_estimate")
    assert logged(estimated, "clip_bias/share_estimate") == pytest.approx(share, rel=1e-9)
    for name, weight in other.after[1].items():
        torch.testing.assert_close(one.after[1][name], weight, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("loss_type", "accumulation", "weighted"),
    [("grpo", 1, True), ("grpo", 4, False), ("bnpo", 4, True)],
)
def test_entropy_bonus_and_loss_kl_are_neither_scaled_nor_counted(
    loss_type, accumulation, weighted, tmp_path
):
    beta, entropy_coef = 0.3, 0.2
    trainer, recorder = train(
        tmp_path, variant="st-ppo", loss_type=loss_type, stabilizers=["triggered"],
        max_grad_norm=1e9, beta=beta, entropy_coef=entropy_coef, use_bias_correction_kl=weighted,
        ref_model=float64_policy(char_tokenizer(), seed=7),
        per_device_train_batch_size=8 // accumulation, gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    reference = LossReference(recorder.batches[0], "turn", loss_type, kl_times_ratio=weighted)
    g, bias = reference.g, reference.bias
    extra = reference.grad(beta * reference.kl - entropy_coef * reference.entropy)
    assert norm(extra) > 0.1 * norm(g), "the case should be interesting"
    scale = 1 / norm(bias)
    assert logged(trainer, "clip_bias/grad_norm") == pytest.approx([norm(g)], rel=1e-9)
    assert logged(trainer, "clip_bias/norm") == pytest.approx([norm(bias)], rel=1e-9)
    assert logged(trainer, "clip_bias/scale") == pytest.approx([scale], rel=1e-9)
    assert_same(recorder.grads[0], {name: extra[name] - scale * g[name] for name in g})


def test_loss_value_is_the_usual_objective(tmp_path):
    """What is logged as loss is min/clip PPO plus the value loss, not the kept terms alone."""
    trainer, recorder = train(tmp_path, clip_bias_estimator="exact")
    expected = -LossReference(recorder.batches[0]).clipped.item()
    expected += trainer.args.vf_coef * logged(trainer, "value/loss")[0]
    assert math.isclose(logged(trainer, "loss")[0], expected, rel_tol=1e-6)
