"""Logged deviations: exactly 0 for values that are equal up to rounding, exact for others."""

import math
import random
import statistics

import pytest
import torch

from tests.kit.builders import LIMITS, TEXT, logs, prompts, train
from tests.kit.fakes import CountEnv, char_tokenizer, float64_policy, float64_value_model
from trl_stppo import PPOTrainer, STGRPOTrainer
from trl_stppo.trainer import sums

# Whose sums of a few are rounded, each in its own direction.
ODD = (0.1, 0.7, 1.6023762226104736, -300.7, 1e-30, 1e17)


@pytest.fixture(params=["float64 on the device", "float32 alone"])
def device(request, monkeypatch):
    """Devices that can do float64, and those (Apple's GPUs) that cannot."""
    if request.param == "float32 alone":
        monkeypatch.setattr(sums, "wide", lambda x: x.detach())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equal_values_have_none(device, dtype):
    for value in ODD:
        for count in (2, 3, 7, 8, 4097):
            x = torch.full((count,), value, dtype=dtype)
            assert sums.spread(x).item() == 0.0
            assert sums.spread(x.view(1, -1), 1).tolist() == [0.0]
            x[::2] = torch.nan
            assert sums.spread(x).item() == 0.0 or count < 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equal_rewards_that_were_added_in_another_order_have_none(device, dtype):
    x = torch.zeros(50, dtype=dtype)
    for paid in zip(*(random.sample((0.1, 0.2, 0.3, 0.7, 1.1, 1.3), 6) for _ in x), strict=True):
        x += torch.tensor(paid, dtype=dtype)
    assert len(x.unique()) > 1, "the case should be interesting"
    assert sums.spread(x).item() == 0.0
    assert (sums.centred(x) == 0).all()


def test_others_have_their_own(device):
    x = torch.tensor([[0.5, 2.0, -1.25], [1.0, 1.0, 1.0], [4.0, torch.nan, 1.0]])
    expected = [statistics.stdev(row) for row in ([0.5, 2.0, -1.25], [1.0] * 3, [4.0, 1.0])]
    assert sums.spread(x, 1).tolist() == pytest.approx(expected, rel=1e-6)
    known = [0.5, 2.0, -1.25, 1.0, 1.0, 1.0, 4.0, 1.0]
    assert sums.spread(x).item() == pytest.approx(statistics.stdev(known), rel=1e-6)
    # A large mean, and a spread of a few rounding steps beside it.
    near = 1000.0 + torch.tensor([0.0, 2.0**-10, 2.0**-9])
    assert sums.spread(near).item() == pytest.approx(2.0**-10, rel=1e-6)


def test_fewer_than_two_values_have_no_deviation():
    for values in ([1.0], [1.0, math.nan], [math.nan, math.nan]):
        assert math.isnan(sums.spread(torch.tensor(values)).item())


def test_a_reward_without_end_is_not_hidden():
    assert not sums.spread(torch.tensor([math.inf, 1.0, 1.0])).item() < math.inf


class Alike(CountEnv):
    """Pays every episode the same, in an order that its row chooses."""

    def reset(self, row=0, **columns):
        self._parts = [0.1, 0.2, 0.3] if row % 2 else [0.3, 0.2, 0.1]
        return "", {}

    def step(self, action):
        return "go on", self._parts.pop(), not self._parts, False, {}


def alike(completions, **columns):
    return [0.1] * len(completions)


@pytest.mark.long
@pytest.mark.parametrize("kind", [PPOTrainer, STGRPOTrainer])
@pytest.mark.parametrize("text", [True, False])
def test_equal_rewards_are_logged_without_a_deviation(kind, text, tmp_path):
    data = prompts(8, row=[i % 2 for i in range(8)])
    arguments = {"train_dataset": data, "eval_dataset": data}
    arguments |= {**TEXT, "environment_factory": Alike} if text else {"reward_funcs": alike}
    groups = {"num_generations": 4} if kind is STGRPOTrainer else {}
    trainer = train(tmp_path, kind, arguments=arguments, max_steps=1, **groups, **(LIMITS if text else {}))
    found = logs(trainer) | trainer.evaluate()
    spreads = {name: value for name, value in found.items() if name.endswith(("reward_std", "/std"))}
    assert {"reward_std", "eval_reward_std"} <= spreads.keys()
    assert ("rewards/alike/std" in spreads) is (not text)
    if not groups:
        assert spreads.pop("advantage/std") > 0, "those of the critic differ"
    assert set(spreads.values()) == {0.0}, spreads
    if groups:
        assert found["frac_reward_zero_std"] == 1.0


def figures_of_equal_rewards(reward, length, folder, scale):
    """The log of one rollout in which every episode earns the same, with a critic of this size."""
    tokenizer = char_tokenizer()
    policy, critic = float64_policy(tokenizer), float64_value_model(tokenizer)
    with torch.no_grad():
        critic.score.weight.mul_(scale)
    arguments = {"reward_funcs": lambda completions, **_: [reward] * len(completions)}
    arguments |= {"model": policy, "value_model": critic}
    options = {"max_steps": 1, "lam": 1.0, "kl_coef": 0.0, "max_completion_length": length}
    return logs(train(folder, arguments=arguments, **options))


@pytest.mark.parametrize(("reward", "length"), [(123.4, 5), (0.7, 13)])
def test_equal_advantages_deviate_by_nothing(reward, length, tmp_path):
    figures = figures_of_equal_rewards(reward, length, tmp_path, scale=0.0)
    assert figures["advantage/mean"] == pytest.approx(reward)
    assert figures["advantage/std"] == figures["value/explained_variance"] == 0.0


@pytest.mark.parametrize(("scale", "length"), [(1e6, 5), (1e3, 13)])
def test_equal_returns_have_no_variance_to_explain_whatever_the_critic_says(scale, length, tmp_path):
    figures = figures_of_equal_rewards(123.4, length, tmp_path, scale)
    assert figures["advantage/std"] > 100, "the case should be interesting"
    assert figures["value/explained_variance"] == 0.0
