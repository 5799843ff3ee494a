"""The estimate of the clipping bias: what it says, what it scales, where it stands in for the exact one."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from tests.kit.loss_reference import LossReference
from tests.kit.scripted import DEFAULTS, assert_same, logged, train
from tests.kit.tiers import quick
from trl_stppo.trainer.step import ClipBiasEstimate, Terms

ESTIMATED = {"clip_bias_estimator": "logits"}
SPLITS = {"1x8": (1, 8), "2x4": (2, 4), "8x1": (8, 1)}


def by_hand(batch, level) -> tuple[float, float]:
    """Norms of g and C in the space of the logits."""
    reference = LossReference(batch, level)
    derivative = lambda objective: torch.autograd.grad(  # noqa: E731
        objective, reference.logprobs, retain_graph=True
    )[0]
    kept = derivative(reference.clipped)
    squares = [0.0, 0.0]
    for i, coefficient in enumerate((kept, derivative(reference.unclipped) - kept)):
        for b, t in batch["loss_mask"].nonzero().tolist():
            p, entropy = reference.logprobs[b, t].exp().item(), reference.entropies[b, t]
            n = max(1 - 2 * p + torch.exp(-entropy).item(), (1 - p) ** 2)
            squares[i] += coefficient[b, t].item() ** 2 * n
    return squares[0] ** 0.5, squares[1] ** 0.5


@pytest.mark.parametrize(
    ("variant", "split"),
    quick(
        product(["s-ppo", "st-ppo"], SPLITS),
        *zip(["st-ppo", "s-ppo", "st-ppo"], SPLITS, strict=True),
    ),
)
def test_norms_and_scale_equal_an_independent_computation(variant, split, tmp_path):
    rows, steps = SPLITS[split]
    trainer, recorder = train(
        tmp_path,
        variant=variant,
        entropy_coef=0.1,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=steps,
        **ESTIMATED,
    )
    g, bias = by_hand(recorder.batches[0], trainer.importance_sampling_level)
    assert bias > 0.1 * g, "the case should be interesting"
    expected = {"grad_norm_estimate": g, "norm_estimate": bias, "scale": g / (g + bias)}
    for name, value in expected.items():
        assert logged(trainer, f"clip_bias/{name}") == pytest.approx([value], rel=1e-9), name
    assert logged(trainer, "clip_bias/cosine") == logged(trainer, "clip_bias/norm") == []


def test_the_update_is_scaled_and_nothing_else(tmp_path):
    stale = {"staleness": 1.0}
    _, plain = train(tmp_path / "plain", variant="ppo", **stale)
    trainer, scaled = train(tmp_path / "on", **stale, **ESTIMATED)
    (scale,) = logged(trainer, "clip_bias/scale")
    assert scale < 0.95
    assert_same(scaled.grads[0], plain.grads[0], 1e-12)
    expected = {n: scale * move for n, move in plain.moved("policy").items()}
    assert_same(scaled.moved("policy"), expected, 1e-12)
    assert_same(scaled.moved("critic"), plain.moved("critic"), 1e-12)
    assert all(g["lr"] != 0 for g in trainer.optimizer.param_groups)
    assert trainer.optimizer.param_groups[0]["lr"] == DEFAULTS["learning_rate"]


def test_norms_are_of_the_gradient_that_processes_average():
    # p is 1/2 for each of two tokens: |onehot - p|^2 = 1 - 2/2 + 1/2. With derivatives 2 and 4 the squares
    # are 4/2 and 16/2, twice that on two such processes: roots 2 and 4, of the mean half of it.
    logprobs = torch.tensor([[0.5]]).log().requires_grad_()
    surrogate = SimpleNamespace(kept=2.0 * logprobs, clipped=4.0 * logprobs)
    one, entropies = torch.ones(1, 1), torch.tensor([[2.0]]).log()
    estimate = ClipBiasEstimate(torch.device("cpu"))
    estimate.add(Terms(surrogate, one, None, logprobs, entropies, one.bool()))
    norms = estimate.finish(lambda squares: 2 * squares, num_processes=2)
    assert [float(norm) for norm in norms] == pytest.approx([1.0, 2.0], rel=1e-6)


def test_the_exact_mode_logs_the_estimate_beside_it(tmp_path):
    exact, _ = train(tmp_path / "exact", num_ppo_epochs=3, max_steps=3)
    estimated, _ = train(tmp_path / "estimated", **ESTIMATED)
    assert len(logged(exact, "clip_bias/share")) == 3
    both = [logged(run, "clip_bias/share_estimate")[0] for run in (exact, estimated)]
    assert both[0] == pytest.approx(both[1], rel=1e-12)


def test_nothing_clipped_means_scale_one(tmp_path):
    trainer, _ = train(tmp_path, staleness=0.0, **ESTIMATED)
    assert logged(trainer, "clip_bias/scale") == [1.0]
    assert logged(trainer, "clip_bias/norm_estimate") == [0.0]


@pytest.mark.parametrize("variant", ["turn-ppo", "st-ppo"])
def test_an_estimate_that_scales_nothing_stops_no_step(variant, tmp_path, monkeypatch):
    """Half-precision coefficients may overflow in it while losses and gradients are finite."""
    endless = torch.tensor(torch.inf)
    monkeypatch.setattr(ClipBiasEstimate, "finish", lambda *_: (endless, endless))
    options = {"num_ppo_epochs": 2, "max_steps": 2}
    trainer, recorder = train(tmp_path, variant=variant, **options)
    assert logged(trainer, "guard/skipped_steps") == [0.0] * 2
    assert not torch.equal(
        recorder.after[0]["policy/lm_head.weight"], recorder.after[1]["policy/lm_head.weight"]
    )
