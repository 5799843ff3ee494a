"""The factor on a step, by hand: whose rate it multiplies, and for how long."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trl_stppo.trainer.stabilizers import TrustRegion
from trl_stppo.trainer.step_scale import StepScale


class Half(TrustRegion):
    factor = 0.5


def test_a_factor_multiplies_the_policys_rate_in_one_step_alone():
    policy, critic = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))
    groups = [{"params": [policy], "lr": 1.0}, {"params": [critic], "lr": 10.0}]
    optimizer = torch.optim.SGD(groups)
    args = SimpleNamespace(scales_step=True, measures_clip_bias=False)
    accelerator = SimpleNamespace(reduce=lambda x: x, device=torch.device("cpu"))
    scale = StepScale(args, accelerator, [Half(SimpleNamespace(desired_kl=0.1))])
    scale.attach(optimizer, [0], nn.Linear(1, 1), [critic])
    for _ in range(3):
        scale.start_mini_batch()
        assert scale.before_last_backward() == {}
        policy.grad, critic.grad = torch.ones(()), torch.ones(())
        optimizer.step()
    assert policy.item() == pytest.approx(-3 * 0.5)
    assert critic.item() == pytest.approx(-30.0)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 10.0]
