"""The rivals of the study: each against plain loops, in its limits, and as the trainer has it."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests import references
from tests import rival_references as loops
from tests.loss_reference import LossReference
from tests.scripted import Float64Trainer, assert_same, logged, scripted_trainer, train

KERNELS = ("sapo", "cispo", "vespo", "tis", "topr")
SPANS = [[(0, 2), (2, 5), (6, 9)], [(1, 4)], [], [(0, 1), (3, 4), (4, 9)]]
LENGTH = 10
PLAIN = {"variant": None, "importance_sampling_level": "turn"}


@pytest.fixture(scope="module")
def study(script):
    names = ("math", "trainer")
    return SimpleNamespace(**{name: script(f"_rivals_{name}") for name in names})


@pytest.fixture
def case():
    """A batch of four episodes; what lies outside turns is NaN."""
    draw = torch.Generator().manual_seed(3)
    index = torch.tensor(references.turn_index(SPANS, LENGTH))

    def numbers(size=1.0):
        values = size * torch.randn(index.shape, generator=draw, dtype=torch.float64)
        return values.masked_fill(index < 0, math.nan)

    logprobs = -numbers().abs()
    names = ("advantages", "rewards", "values", "coefficient", "other")
    fields = {name: numbers() for name in names}
    old = logprobs + numbers(0.5)
    return SimpleNamespace(
        index=index,
        mask=index >= 0,
        logprobs=logprobs,
        old=old.clamp(max=0.0),
        proximal=logprobs + numbers(0.5),
        entropies=numbers().abs(),
        **fields,
    )


def same(tensor, rows, mask=None):
    expected = torch.tensor(rows, dtype=torch.float64)
    actual = tensor.double() if mask is None else tensor.double().masked_fill(~mask, 0.0)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def squares_of(study, case):
    arguments = (case.logprobs, case.entropies, case.mask)
    return [study.math.token_squares(c, *arguments) for c in (case.coefficient, case.other.relu())]


@pytest.mark.parametrize("power", [1.0, 4.0])
def test_weights_are_those_of_a_loop(study, case, power):
    kept, clipped = squares_of(study, case)
    lists = [x.tolist() for x in (case.logprobs, case.entropies, case.index)]
    rows = [
        loops.squares(c.tolist(), *lists) for c in (case.coefficient, case.other.clamp(min=0.0))
    ]
    same(kept, rows[0])
    same(clipped, rows[1])
    index = case.index.tolist()
    u = study.math.episode_weights(kept, clipped, power).expand(case.index.shape)
    same(u, loops.weights(*rows, index, power, of_turns=False), case.mask)
    v = study.math.turn_weights(kept, clipped, case.index, power)
    same(v, loops.weights(*rows, index, power, of_turns=True))
    assert u.min() < 0.95


def test_limits_of_weights(study, case):
    kept, clipped = squares_of(study, case)
    nothing = torch.zeros_like(kept)
    for weights in (
        study.math.episode_weights,
        partial(study.math.turn_weights, index=case.index),
    ):
        ones = weights(kept, nothing).expand(kept.shape)[case.mask]
        assert (ones == 1).all(), "nothing is clipped"
        both = weights(nothing, nothing).expand(kept.shape)[case.mask]
        assert (both == 1).all(), "an episode without terms"
        zeros = weights(nothing, kept).expand(kept.shape)[case.mask]
        assert (zeros == 0).all(), "all is clipped"
        # A constant of each episode, as the loss's aggregation has it, cancels.
        factor = torch.tensor([[1e-4], [3.0], [1.0], [70.0]], dtype=torch.float64)
        torch.testing.assert_close(
            weights(factor * kept, factor * clipped), weights(kept, clipped), rtol=1e-12, atol=0
        )


def test_winners_are_episodes_with_more_to_gain_than_to_lose(study, case):
    sums = [
        sum(a for a, k in zip(row, index, strict=True) if k >= 0)
        for row, index in zip(case.advantages.tolist(), case.index.tolist(), strict=True)
    ]
    actual = study.math.winners(case.advantages, case.mask)
    assert actual.squeeze(1).tolist() == [float(total > 0) for total in sums]


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (0.8, 0.0)])
def test_vtrace_is_that_of_a_loop(study, case, gamma, lam, mean):
    drift = case.logprobs - case.old
    arguments = [case.rewards, case.values, drift, case.index]
    advantages, targets = study.math.vtrace(*arguments, gamma, lam, mean=mean)
    expected = loops.vtrace(*(x.tolist() for x in arguments), gamma, lam, mean)
    same(advantages, expected[0])
    same(targets, expected[1])


def test_vtrace_without_drift_is_gae_over_turns(study, case):
    from trl_stppo.core import turn_gae

    rewards, values = (x.nan_to_num() for x in (case.rewards, case.values))
    drift = torch.zeros_like(rewards)
    actual = study.math.vtrace(rewards, values, drift, case.index, 0.9, 0.8, mean=False)
    for ours, theirs in zip(actual, turn_gae(rewards, values, case.index, 0.9, 0.8), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("delta", [0.05, 0.2, 0.4])
def test_the_trust_region_is_that_of_a_loop(study, case, delta):
    arguments = [case.logprobs, case.old, case.advantages, case.index]
    actual = study.math.outside_trust_region(*arguments, delta)
    same(actual, loops.outside(*(x.tolist() for x in arguments), delta))
    assert not study.math.outside_trust_region(
        case.old, case.old, case.advantages, case.index, delta
    ).any()


@pytest.mark.parametrize("limit", [1e-4, 0.04, 0.1, 10.0])
def test_the_second_moment_is_that_of_a_loop(study, case, limit):
    drift = case.logprobs - case.old
    actual = study.math.beyond_second_moment(drift, case.index, limit)
    same(actual, loops.second_moment(drift.tolist(), case.index.tolist(), limit))
    assert actual.any() == (limit < 1)
    assert not study.math.beyond_second_moment(0 * drift, case.index, limit).any()


def test_weights_of_the_player(study, case):
    actual = study.math.behaviour_weights(case.proximal, case.old, case.index, 1.2)
    rows = [x.tolist() for x in (case.proximal, case.old, case.index)]
    same(actual, loops.behaviour(*rows, 1.2))
    assert (study.math.behaviour_weights(case.old, case.old, case.index) == 1).all()


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_have_the_gradient_of_a_loop(study, case, name):
    logprobs = case.logprobs.clone().requires_grad_()
    terms = study.math.kernel_terms(name, logprobs, case.old, case.advantages, case.index)
    assert (terms[~case.mask] == 0).all()
    (gradient,) = torch.autograd.grad(terms.sum(), logprobs)
    rows = [x.tolist() for x in (case.logprobs, case.old, case.advantages, case.index)]
    same(gradient, loops.kernel_gradient(name, *rows))


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_reduce_to_the_policy_gradient(study, case, name):
    logprobs = case.logprobs.clone().requires_grad_()
    advantages = references_of_turns(case)
    terms = study.math.kernel_terms(name, logprobs, case.logprobs, advantages, case.index)
    (gradient,) = torch.autograd.grad(terms.sum(), logprobs)
    expected = advantages.masked_fill(~case.mask, 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def references_of_turns(case):
    """One advantage for all of a turn's tokens."""
    return case.index.double() - 0.5


def test_effective_share_and_scales(study):
    share = study.math.effective_share
    assert float(share(torch.zeros(5))) == 1
    assert float(share(torch.zeros(0))) == 1
    assert float(share(torch.tensor([0.0, -math.inf]))) == pytest.approx(0.5)
    w = [0.5, 3.0, 8.0]
    expected = sum(w) ** 2 / (3 * sum(x * x for x in w))
    assert float(share(torch.tensor([0.5, 3.0, 30.0]).log())) == pytest.approx(expected)
    assert study.math.share_scale(0.2, 0.8) == pytest.approx(0.5)
    assert study.math.share_scale(0.9, 0.8) == 1


@pytest.mark.parametrize(
    ("factor", "kl", "expected"),
    [(1.0, 0.021, 1 / 1.5), (1.0, 0.02, 1), (1.0, 0.005, 1), (1.0, 0.004, 1.5), (2.0, 0.0, 2.5)],
)
def test_the_adaptive_rate(study, factor, kl, expected):
    assert study.math.adapted(factor, kl, 0.01, 0.1, 2.5) == pytest.approx(expected)
    assert study.math.adapted(0.12, 1.0, 0.01, 0.1, 2.5) == 0.1


# --------------------------------------------------------------------------- in the trainer


def rival(study, folder, arm, *, keep=None, **options):
    """A scripted trainer with a rival's parts; it keeps the weights that it has used."""

    class Rival(study.trainer.RivalTrainer, Float64Trainer):
        def _weights(self, *args):
            weights = super()._weights(*args)
            if keep is not None:
                keep.append(weights)
            return weights

    return scripted_trainer(
        folder,
        trainer_class=partial(Rival, arm=arm),
        **{**PLAIN, **study.trainer.settings_of(arm), **options},
    )


def gradient_of(trainer, recorder):
    trainer.train()
    return recorder.grads[0]


@pytest.mark.parametrize("arm", ["episodes", "turns", "mask", "decoupled", "vespo", "vtrace"])
def test_the_split_into_micro_batches_changes_nothing(study, tmp_path, arm):
    whole = gradient_of(*rival(study, tmp_path / "1", arm))
    for rows, steps in ((2, 4), (8, 1)):
        split = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps}
        assert_same(gradient_of(*rival(study, tmp_path / f"{rows}", arm, **split)), whole, 1e-9)


@pytest.mark.parametrize("arm", ["episodes", "turns"])
def test_weights_know_nothing_of_the_aggregation(study, tmp_path, arm):
    seen = {}
    for loss_type in ("grpo", "dapo", "dr_grpo"):
        used = seen.setdefault(loss_type, [])
        trainer, _ = rival(study, tmp_path / loss_type, arm, keep=used, loss_type=loss_type)
        trainer.train()
    first = seen.pop("grpo")[0]
    assert first.min() < 0.5
    assert (first.amax(1) - first.amax(1)[0]).abs().max() > 0.01
    for weights in seen.values():
        torch.testing.assert_close(weights[0], first, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("arm", ["episodes", "turns"])
def test_the_weighted_gradient_is_that_of_an_independent_computation(study, tmp_path, arm):
    trainer, recorder = rival(study, tmp_path, arm)
    trainer.train()
    (batch,) = recorder.batches
    batch["ref_per_token_logps"] = batch["old_per_token_logps"]  # not asked for
    reference = LossReference(batch, "turn")
    logprobs = reference.logprobs
    objectives = (reference.clipped, reference.unclipped - reference.clipped)
    kept, clipped = (
        torch.autograd.grad(objective, logprobs, retain_graph=True)[0].masked_fill(
            ~batch["loss_mask"], 0.0
        )
        for objective in objectives
    )
    index = batch["turn_index"].tolist()
    rows = [
        loops.squares(c.tolist(), logprobs.tolist(), reference.entropies.tolist(), index)
        for c in (kept, clipped)
    ]
    weights = torch.tensor(loops.weights(*rows, index, 4.0, of_turns=arm == "turns"))
    expected = reference.grad((weights * kept * logprobs).nan_to_num().sum())
    actual = {name: -gradient for name, gradient in recorder.grads[0].items()}
    assert_same({n: actual[n] for n in expected if n in actual}, expected, 1e-6)


def test_weights_shorten_the_kept_terms_alone(study, tmp_path):
    """The share of a step is of the weighted kept terms and of the clipped ones as they are."""
    plain, _ = rival(study, tmp_path / "plain", "share")
    plain.train()
    trainer, _ = rival(study, tmp_path / "on", "episodes+share")
    trainer.train()
    for name in ("clip_bias/norm", "policy/clip_fraction", "policy/approx_kl", "loss"):
        assert logged(trainer, name) == pytest.approx(logged(plain, name), rel=1e-9), name
    g, c, scale = (
        logged(trainer, f"clip_bias/{name}")[0] for name in ("grad_norm", "norm", "scale")
    )
    assert g < 0.9 * logged(plain, "clip_bias/grad_norm")[0]
    assert scale == pytest.approx((g / (g + c)) ** trainer.args.clip_bias_power)


ON_POLICY = ("episodes", "turns", "mask", "m2po", "decoupled", "ess", "ess-turns", "ess-0.55+tis")


@pytest.mark.parametrize("arm", ON_POLICY)
def test_on_policy_it_is_the_base_method(study, tmp_path, arm):
    options = {"staleness": 0, "whiten_advantages": False, "advantage_level": "turn"}
    # Without a clip a term is A log p per token; where a turn has one advantage the sums are equal.
    _, base = train(tmp_path / "base", **PLAIN, stabilizers="none", **options)
    trainer, recorder = rival(study, tmp_path / "rival", arm, **options)
    assert_same(gradient_of(trainer, recorder), base.grads[0], 1e-9)
    assert_same(recorder.moved("policy"), base.moved("policy"), 1e-9)


@pytest.mark.parametrize(
    ("arm", "level"), [("vtrace", "turn"), ("vtrace-mean", "turn"), ("token-gae", "token")]
)
def test_a_new_epoch_has_new_advantages(study, tmp_path, arm, level):
    options = {"staleness": 0, "num_ppo_epochs": 2, "max_steps": 2}
    _, base = train(
        tmp_path / "base", **PLAIN, stabilizers="none", advantage_level=level, **options
    )
    trainer, recorder = rival(study, tmp_path / "rival", arm, **options)
    trainer.train()
    assert_same(recorder.grads[0], base.grads[0], 1e-9)  # the first epoch is on-policy
    with pytest.raises(AssertionError):
        assert_same(recorder.grads[1], base.grads[1], 1e-3)
    one, two = recorder.batches
    assert not torch.equal(one["values"].sort(0)[0], two["values"].sort(0)[0])


def test_the_rate_follows_the_kl(study, tmp_path):
    steps = {"optim": "sgd", "num_ppo_epochs": 3, "max_steps": 3}
    trainer, _ = rival(study, tmp_path, "kl-1000", **steps, learning_rate=1e-3)
    trainer.train()
    assert logged(trainer, "study/scale") == pytest.approx([1.5, 1.5**2, 1.5**3])
    assert len(logged(trainer, "study/token_kl")) == 3
