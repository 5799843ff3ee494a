"""The arm `kl`: its sums and factor by hand, when it decides, and what `train()` makes of a step."""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.kit.script_kit import scripts
from tests.kit.scripted import logged, scripted_trainer, train
from trl_stppo.trainer.stabilizers import STABILIZERS

with scripts() as script_module:
    module = script_module("_kl")
FIRST_FACTOR, Kl, kl_per_turn = module.FIRST_FACTOR, module.Kl, module.kl_per_turn
next_step_factor = module.next_step_factor
# Other tests of this process must not find what the import has registered.
STABILIZERS.pop("kl"), STABILIZERS.pop("kl-0.05")

CPU = torch.device("cpu")


def stabilizer(epochs=2, parts=2, staleness=0) -> Kl:
    settings = {
        "num_mini_batches": parts,
        "steps_per_rollout": epochs * parts,
        "rollout_staleness": staleness,
    }
    return Kl(SimpleNamespace(**settings))


def play(one: Kl, kls, *, turns=40, taken=(), clip_fraction=0.5, reduce=lambda x: x) -> list[float]:
    """Train on an update whose mini-batches have these KLs per turn; return the factors on its steps."""
    factors = []
    for step, kl in enumerate(kls):
        one.start_mini_batch(step)
        one._sums = torch.tensor([kl * turns, turns], dtype=torch.float64)
        factors.append(one.before_step(reduce, CPU)[0])
        went = taken[step] if taken else True
        one.end_step(taken=went, clip_fraction=clip_fraction)
    return factors


@pytest.mark.parametrize(("kls", "options", "after"), [
    # Mini-batches of the first epoch do not count, nor does one before the first step.
    ([0.39, 0.39, 0.0, 0.0], {}, 0.15),
    ([0.0, 0.0, 0.3, 0.3], {}, 0.1 / 1.5),
    ([0.0, 0.0, 0.0, 0.3], {}, 0.1),
    ([0.0, 0.0, 0.0, 0.0], {"taken": (True, True, False, True)}, 0.1),
    ([0.3, 0.3, 0.3, 0.3], {"taken": (False, False, False, False)}, 0.1),
    ([0.0, 0.0, 0.0, 0.0], {"clip_fraction": 1.0}, 0.1),
    ([0.0, 0.0, float("nan"), 0.0], {}, 0.1 / 1.5),
])  # fmt: skip
def test_an_update_by_hand(kls, options, after):
    one = stabilizer()
    assert play(one, kls, **options) == [FIRST_FACTOR] * 4
    assert one.factor == pytest.approx(after, rel=1e-12)


def test_the_first_mini_batch_of_a_single_epoch_does_not_count():
    one = stabilizer(epochs=1, parts=3)
    play(one, [9.0, 0.0, 0.0], turns=31)
    assert one.factor == pytest.approx(0.15)


def test_the_mean_is_over_turns_not_over_mini_batches():
    one = stabilizer(epochs=2, parts=1)
    one.start_mini_batch(0)
    one.end_step(taken=True, clip_fraction=0.0)
    one.start_mini_batch(1)
    one.observe(*pass_of(kl_tokens=3))
    one.observe(*pass_of(kl_tokens=0))
    kl = one.before_step(lambda x: 2 * x, CPU)[1]["step/kl_per_turn"]
    x = torch.tensor(0.5, dtype=torch.float64)
    assert kl == pytest.approx(3 * float(x.expm1() - x) / 4)


def pass_of(kl_tokens):
    """Two turns of two tokens, some of which have moved by half a nat."""
    old = torch.zeros(1, 4, dtype=torch.float64)
    new = old.clone()
    new[0, :kl_tokens] = 0.5
    return new, old, torch.tensor([[0, 0, 1, 1]]), torch.ones(1, 4, dtype=torch.bool)


def test_the_brake_halves_once_per_epoch_and_forbids_growth():
    one = stabilizer(epochs=2, parts=3)
    assert play(one, [0.0, 0.5, 0.5, 0.0, 0.0, 0.0]) == [0.1, 0.05, 0.05, 0.05, 0.05, 0.05]
    assert one.factor == 0.05
    assert play(one, [0.5, 0.5, 0.0, 0.5, 0.0, 0.0])[-1] == 0.0125
    # Fewer than 32 turns decide nothing.
    assert play(stabilizer(), [0.5, 0.5, 0.0, 0.0], turns=31) == [0.1] * 4


def test_staleness_slows_the_factor():
    one = stabilizer(staleness=1)
    play(one, [0.0] * 4)
    assert one.factor == pytest.approx(0.1 * 1.5**0.5)


def test_its_state_goes_on_within_an_update():
    whole, half, other = (stabilizer() for _ in range(3))
    kls = [0.0, 0.5, 0.0, 0.3]
    play(whole, kls)
    play(half, kls[:3])
    other.load_state_dict(half.state_dict())
    other.start_mini_batch(3)
    other._sums = torch.tensor([12.0, 40.0], dtype=torch.float64)
    other.before_step(lambda x: x, CPU)
    other.end_step(taken=True, clip_fraction=0.5)
    assert other.state_dict() == whole.state_dict()


def test_a_step_is_scaled_with_its_weight_decay_and_other_factors(tmp_path, monkeypatch):
    """One step of SGD moves the policy in proportion to the factor, which `share` multiplies."""
    monkeypatch.setitem(STABILIZERS, "kl", Kl)
    settings = {
        "max_steps": 1,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
    }

    def moved(folder, **options):
        trainer, _ = scripted_trainer(tmp_path / folder, **settings, **options)
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.train()
        after = trainer.model.parameters()
        return [b - a for a, b in zip(before, after, strict=True)], trainer

    plain, _ = moved("plain", variant="ppo")
    scaled, trainer = moved("kl", stabilizers=["kl"])
    assert logged(trainer, "step/eta") == [FIRST_FACTOR]
    for one, other in zip(plain, scaled, strict=True):
        torch.testing.assert_close(other, FIRST_FACTOR * one, rtol=1e-5, atol=1e-9)
    _, trainer = moved("both", stabilizers=["kl", "share"])
    assert logged(trainer, "step/eta") == [FIRST_FACTOR]
    assert logged(trainer, "clip_bias/scale")


@pytest.mark.long
def test_the_factor_follows_a_run(tmp_path, monkeypatch):
    """A tiny desired KL lowers the factor after each update, a large one raises it."""
    steps = {"num_ppo_epochs": 2, "max_steps": 6, "learning_rate": 1e-3, "stabilizers": ["kl"]}
    monkeypatch.setitem(STABILIZERS, "kl", Kl)
    monkeypatch.setattr(Kl, "desired_kl", 1e-12)
    low, _ = train(tmp_path / "low", **steps)
    monkeypatch.setattr(Kl, "desired_kl", 1e3)
    high, _ = train(tmp_path / "high", **steps)
    factors = [1 / 1.5, 1 / 1.5**2]
    assert logged(low, "step/eta")[2::2] == pytest.approx([FIRST_FACTOR * f for f in factors])
    assert logged(high, "step/eta")[2::2] == pytest.approx([0.15, 0.225])


NAN, INF = float("nan"), float("inf")


def test_by_hand():
    # Turn 0: ratios 2 and 1/2; turn 1 does not train; turn 2: ratio 1. Outside turns anything may stand.
    index = torch.tensor([[0, 0, -1, 1, 2]])
    mask = torch.tensor([[True, True, False, False, True]])
    old = torch.tensor([[-1.0, -1.0, NAN, 0.0, -3.0]], dtype=torch.float64)
    new = old + torch.tensor([[math.log(2), -math.log(2), INF, 9.0, 0.0]], dtype=torch.float64)
    total, turns = kl_per_turn(new, old, index, mask)
    assert turns == 2
    assert total.item() == pytest.approx((2 - 1 - math.log(2)) + (0.5 - 1 + math.log(2)), rel=1e-12)


def test_against_a_loop_and_under_padding_and_splits():
    torch.manual_seed(0)
    old = torch.randn(6, 9, dtype=torch.float64)
    new = old + 0.5 * torch.randn(6, 9)
    index = torch.tensor([[0, 0, -1, 1, 1, 1, -1, 2, -1]] * 6)
    mask = (index >= 0) & (torch.rand(6, 9) < 0.5)
    expected, turns = 0.0, set()
    for row in range(6):
        for token in range(9):
            if mask[row, token]:
                x = float(new[row, token]) - float(old[row, token])
                expected += math.exp(x) - 1 - x
                turns.add((row, int(index[row, token])))
    total, count = kl_per_turn(new.requires_grad_(), old, index, mask)
    assert not total.requires_grad
    assert (total.item(), count.item()) == pytest.approx((expected, len(turns)), rel=1e-12)
    parts = [kl_per_turn(new[i], old[i], index[i], mask[i]) for i in (slice(0, 2), slice(2, 6))]
    assert sum(p[0] for p in parts).item() == pytest.approx(expected, rel=1e-12)
    assert sum(p[1] for p in parts) == count
    wide = [torch.nn.functional.pad(x, (0, 3), value=v) for x, v in ((new, NAN), (old, 1.0))]
    empty = torch.nn.functional.pad(index, (0, 3), value=-1), torch.nn.functional.pad(mask, (0, 3))
    assert kl_per_turn(*wide, *empty)[0].item() == total.item()


def test_one_token_keeps_the_sum_finite_and_nothing_is_no_turn():
    ids = torch.zeros(1, 1, dtype=torch.int64)
    total, _ = kl_per_turn(torch.full((1, 1), 500.0), torch.zeros(1, 1), ids, ids == 0)
    assert total.item() == pytest.approx(math.expm1(20.0) - 500.0)
    assert [x.item() for x in kl_per_turn(torch.ones(1, 1), ids.float(), ids, ids > 0)] == [
        0.0,
        0.0,
    ]


@pytest.mark.parametrize(("kl", "options", "factor"), [
    (0.201, {}, 0.3 / 1.5),
    (0.2, {}, 0.3),
    (0.05, {}, 0.3),
    (0.049, {}, 0.45),
    (0.0, {"may_grow": False}, 0.3),
    (0.3, {"may_grow": False}, 0.2),
    (NAN, {}, 0.2),
    (INF, {}, 0.2),
    (0.3, {"delay": 1}, 0.3 / math.sqrt(1.5)),
    (0.0, {"delay": 3}, 0.3 * 1.5**0.25),
])  # fmt: skip
def test_the_factor_by_hand(kl, options, factor):
    assert next_step_factor(0.3, kl, 0.1, **options) == pytest.approx(factor, rel=1e-12)


def test_the_factor_has_bounds():
    assert next_step_factor(0.9, 0.0, 0.1) == 1.0
    assert next_step_factor(0.0011, 1.0, 0.1) == 0.001
