"""The factor on a step, by hand: whose rate it multiplies, and for how long."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trl_stppo.trainer.stabilizers import TrustRegion
from trl_stppo.trainer.step import Step


class Half(TrustRegion):
    factor = 0.5


def test_a_factor_multiplies_the_policys_rate_in_one_step_alone():
    policy, critic = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
    groups = [{"params": [policy], "lr": 1.0}, {"params": [critic], "lr": 10.0}]
    optimizer = torch.optim.SGD(groups)
    args = SimpleNamespace(takes_second_gradient=False, measures_clip_bias=False)
    accelerator = SimpleNamespace(state=None, reduce=lambda x: x, device=torch.device("cpu"), num_processes=1)
    stabilizers, seen = [Half(SimpleNamespace(desired_kl=0.1, steps_per_rollout=2))], []
    step = Step(args, accelerator, [critic], stabilizers)
    step.attach(optimizer)
    optimizer.register_step_post_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))
    for _ in range(3):
        step.begin()
        step.set_factor()
        policy.grad = torch.ones(())
        step.critic_grads.add(1.0 * critic)
        optimizer.step()
    assert policy.item() == pytest.approx(-3 * 0.5)
    assert critic.item() == pytest.approx(-30.0)
    assert seen == [1.0] * 3, "what follows a step sees the scheduled rate"
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 10.0]
