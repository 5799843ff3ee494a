"""What the scale s does to an optimizer step: to the gradient before it, or to the step itself."""

from itertools import product

import pytest
import torch
from transformers import TrainerCallback

from tests.kit.scripted import DEFAULTS, assert_same, logged, norm, train
from tests.kit.tiers import quick

LEARNING_RATE, CRITIC_RATE = DEFAULTS["learning_rate"], DEFAULTS["critic_learning_rate"]
# The gradient clip that "triggered" asks for, out of the way.
TRIGGERED = {"stabilizers": ["triggered"], "max_grad_norm": 1e9}


def scaled(tensors, factor):
    return {name: factor * tensor for name, tensor in tensors.items()}


def last(trainer, name):
    return logged(trainer, f"clip_bias/{name}")[-1]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """g as it is without correction or clipping, with ||g|| and ||C||."""
    options = {"variant": "ppo", "clip_bias_estimator": "exact"}
    trainer, recorder = train(tmp_path_factory.mktemp("plain"), **options)
    return recorder, last(trainer, "grad_norm"), last(trainer, "norm")


def as_policy(grads):
    return {f"policy/{name}": grad for name, grad in grads.items()}


def test_scaled_update_is_exactly_lr_times_s_times_g(plain, tmp_path):
    recorder, g, bias = plain
    trainer, corrected = train(tmp_path)
    s = g / (g + bias)
    assert last(trainer, "scale") == pytest.approx(s, rel=1e-12)
    expected = scaled(as_policy(recorder.grads[0]), -LEARNING_RATE * s)
    assert_same(corrected.moved("policy"), expected, 1e-12)
    assert_same(corrected.grads[0], recorder.grads[0], 1e-15)


def test_scaled_update_comes_after_the_gradient_clip(plain, tmp_path):
    recorder, g, bias = plain
    limit = 0.5 * g
    _, corrected = train(tmp_path, max_grad_norm=limit)
    factor = -LEARNING_RATE * g / (g + bias) * limit / g
    assert_same(corrected.moved("policy"), scaled(as_policy(recorder.grads[0]), factor), 1e-5)


@pytest.mark.parametrize(
    ("limit", "size"),
    quick(product([0.5, 1.0], [0.3, 0.6, 1.2]), (0.5, 0.3), (1.0, 0.6), (0.5, 1.2)),
)
def test_triggered_makes_the_step_of_the_formula(size, limit, tmp_path):
    """g min(1/||C||, m/||g||), g clipped to m alone where nothing is clipped."""
    options = {"staleness": size, "max_grad_norm": 0.0}
    plain, recorder = train(tmp_path / "plain", variant="ppo", clip_bias_estimator="exact", **options)
    g, bias = last(plain, "grad_norm"), last(plain, "norm")
    options |= {"max_grad_norm": limit, "stabilizers": ["triggered"]}
    _, corrected = train(tmp_path / "triggered", **options)
    factor = min(1 / bias, limit / g)
    assert_same(corrected.grads[0], scaled(recorder.grads[0], factor), 1e-5)


def test_triggered_without_a_clipped_token_only_clips_the_gradient(tmp_path):
    options = {"staleness": 0.0, "max_grad_norm": 0.1}
    trainer, corrected = train(tmp_path / "triggered", stabilizers=["triggered"], **options)
    _, plain = train(tmp_path / "ppo", variant="ppo", **options)
    assert last(trainer, "scale") == 1.0
    assert norm(corrected.grads[0]) == pytest.approx(0.1, rel=1e-4)
    assert_same(corrected.grads[0], plain.grads[0], 1e-12)


@pytest.fixture(scope="module")
def adam_steps(tmp_path_factory):
    """The first AdamW step, with decoupled weight decay: plain, scaled gradient, scaled update."""
    options = {
        "optim": "adamw_torch", "learning_rate": 1e-3, "critic_learning_rate": 1e-3,
        "adam_epsilon": 1e-14, "weight_decay": 0.5,
    }  # fmt: skip
    targets = {
        "none": {"variant": "ppo", "clip_bias_estimator": "exact"},
        "gradient": TRIGGERED,
        "update": {},
    }
    return {
        name: train(tmp_path_factory.mktemp(name), **options, **target) for name, target in targets.items()
    }


def test_adam_undoes_a_scale_on_the_gradient(adam_steps):
    (trainer, scaled_run), (_, plain_run) = adam_steps["gradient"], adam_steps["none"]
    assert abs(last(trainer, "scale") - 1.0) > 0.1
    assert_same(scaled_run.moved("policy"), plain_run.moved("policy"), 1e-4)


def test_adam_cannot_undo_a_scale_on_the_update(adam_steps):
    """Weight decay scales along, because it is part of the update."""
    (trainer, scaled_run), (_, plain_run) = adam_steps["update"], adam_steps["none"]
    s = last(trainer, "scale")
    assert s < 0.7
    # A move is a difference of weights, so its relative rounding error grows as it becomes smaller.
    assert_same(scaled_run.moved("policy"), scaled(plain_run.moved("policy"), s), 1e-12 / s)
    # Where no gradient arrives the decay is the whole step.
    decayed = -1e-3 * 0.5 * s * scaled_run.before["policy/transformer.wte.weight"][1]
    torch.testing.assert_close(scaled_run.moved("policy")["policy/transformer.wte.weight"][1], decayed)


def test_moments_of_adam_are_not_scaled_with_the_update(adam_steps):
    (scaled_trainer, _), (plain_trainer, _) = adam_steps["update"], adam_steps["none"]
    for one, other in zip(
        scaled_trainer.optimizer.state.values(), plain_trainer.optimizer.state.values(), strict=True
    ):
        assert torch.equal(one["exp_avg"], other["exp_avg"])
        assert torch.equal(one["exp_avg_sq"], other["exp_avg_sq"])


class RateWatcher(TrainerCallback):
    """Learning rates of all groups as the scheduler and the log will see them after each step."""

    def __init__(self) -> None:
        self.rates: list[list[float]] = []

    def on_optimizer_step(self, *args, optimizer, **kwargs):
        self.rates.append([group["lr"] for group in optimizer.param_groups])


@pytest.mark.long
def test_scheduler_and_log_never_see_the_scaled_learning_rate(tmp_path):
    options = {
        "lr_scheduler_type": "linear", "warmup_steps": 2, "num_ppo_epochs": 4, "max_steps": 4,
    }  # fmt: skip
    seen = {}
    for variant in ("ppo", "s-ppo"):
        watcher = RateWatcher()
        trainer, _ = train(tmp_path / variant, variant=variant, callbacks=[watcher], **options)
        final = [group["lr"] for group in trainer.optimizer.param_groups]
        seen[variant] = (watcher.rates, logged(trainer, "learning_rate"), final)
    assert len(seen["ppo"][0]) == 4
    assert seen["s-ppo"] == seen["ppo"]


@pytest.mark.parametrize("options", [TRIGGERED, {}], ids=["gradient", "update"])
def test_the_critic_steps_as_without_correction(options, plain, tmp_path):
    trainer, corrected = train(tmp_path, **options)
    assert last(trainer, "scale") != 1.0
    moved, expected = corrected.moved("critic"), plain[0].moved("critic")
    assert norm(expected) > 0
    for name, change in expected.items():
        assert torch.equal(moved[name], change), name


def test_the_critic_is_clipped_apart_from_the_policy(plain, tmp_path):
    """Neither gradient counts in the other's norm."""
    free_policy, free_critic = (norm(plain[0].moved(part)) for part in ("policy", "critic"))
    limit = 0.5 * min(free_policy / LEARNING_RATE, free_critic / CRITIC_RATE)
    trainer, recorder = train(tmp_path / "limited", variant="ppo", max_grad_norm=limit)
    assert norm(recorder.moved("policy")) == pytest.approx(LEARNING_RATE * limit, rel=1e-4)
    assert norm(recorder.moved("critic")) == pytest.approx(CRITIC_RATE * limit, rel=1e-4)
    assert logged(trainer, "value/grad_norm") == pytest.approx([free_critic / CRITIC_RATE])
    # A huge critic gradient shortens no policy step.
    limit = free_policy / LEARNING_RATE * 1.01
    _, recorder = train(tmp_path / "huge", variant="ppo", max_grad_norm=limit, vf_coef=1e4)
    assert_same(recorder.moved("policy"), plain[0].moved("policy"), 1e-6)
    assert norm(recorder.moved("critic")) == pytest.approx(CRITIC_RATE * limit, rel=1e-4)


def test_no_gradient_survives_its_step(tmp_path):
    """A leftover of the critic's would be added to its next one, whose length would not fit."""
    trainer, recorder = train(tmp_path, num_ppo_epochs=3, max_steps=3)
    assert all(p.grad is None for p in trainer.critic.parameters())
    assert all(p.grad is None for p in trainer.model.parameters())
    lengths = [norm(recorder.moved("critic", step)) for step in range(3)]
    assert max(lengths) < 1.3 * lengths[0], "two or three gradients on top of each other"
