"""`kl`: what it sums over an update, when it decides, and what becomes of a step through `train()`."""

from types import SimpleNamespace

import pytest
import torch

from tests.kit.scripted import logged, scripted_trainer, train
from trl_stppo import STPPOConfig
from trl_stppo.trainer.stabilizers.kl import FIRST_FACTOR, Kl
from trl_stppo.trainer.stabilizers.share import Share

CPU = torch.device("cpu")


def stabilizer(epochs=2, parts=2, staleness=0) -> Kl:
    settings = {
        "desired_kl": 0.1,
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


def test_an_update_that_target_kl_ends_counts_its_last_epoch():
    one = stabilizer(epochs=3, parts=1)
    for step, kl in enumerate((0.0, 0.35, None)):
        one.start_mini_batch(step)
        if kl is not None:
            one._sums = torch.tensor([kl * 31, 31], dtype=torch.float64)
            one.before_step(lambda x: x, CPU)
        one.end_step(taken=step == 0, clip_fraction=0.5)
    assert one.factor == pytest.approx(0.1 / 1.5)


def test_an_update_of_one_step_leaves_the_factor():
    one = stabilizer(epochs=1, parts=1, staleness=4)
    assert [play(one, [0.5]) for _ in range(3)] == [[0.1]] * 3


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


def test_a_small_mini_batch_weighs_little():
    one = stabilizer(epochs=2, parts=2)
    play(one, [0.0, 0.0])
    for step, (kl, turns) in enumerate([(0.0, 30), (0.5, 10)], 2):
        one.start_mini_batch(step)
        one._sums = torch.tensor([kl * turns, turns], dtype=torch.float64)
        one.before_step(lambda x: x, CPU)
        one.end_step(taken=True, clip_fraction=0.5)
    # 5 nats over 40 turns, 0.125 per turn, leave the factor. The mean of the means is 0.25.
    assert one.factor == FIRST_FACTOR


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


@pytest.mark.parametrize(("listed", "factor"), [(["share"], 0.25**4), (["kl", "share"], 0.25)])
def test_share_has_a_power_of_one_beside_it(listed, factor):
    share = Share(SimpleNamespace(stabilizers=listed))
    assert float(share.scale(torch.tensor(1.0), torch.tensor(3.0))) == pytest.approx(factor)


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


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_desired_kl_is_checked(value, tmp_path):
    with pytest.raises(ValueError, match="desired_kl"):
        STPPOConfig(str(tmp_path), variant="st-ppo", stabilizers=["kl"], desired_kl=value)


def test_a_step_is_scaled_with_its_weight_decay_and_other_factors(tmp_path):
    """One step of SGD moves the policy in proportion to the factor, which `share` multiplies."""
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
def test_the_factor_follows_a_run(tmp_path):
    """A tiny desired KL lowers the factor after each update, a large one raises it."""
    steps = {"num_ppo_epochs": 2, "max_steps": 6, "learning_rate": 1e-3}
    low, _ = train(tmp_path / "low", stabilizers=["kl"], desired_kl=1e-12, **steps)
    high, _ = train(tmp_path / "high", stabilizers=["kl"], desired_kl=1e3, **steps)
    factors = [1 / 1.5, 1 / 1.5**2]
    assert logged(low, "step/eta")[2::2] == pytest.approx([FIRST_FACTOR * f for f in factors])
    assert logged(high, "step/eta")[2::2] == pytest.approx([0.15, 0.225])
