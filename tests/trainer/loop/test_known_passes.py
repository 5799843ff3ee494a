"""Passes that would repeat known numbers are left out, and nothing else changes."""

import pytest
import torch

from tests.kit.builders import build
from trl_stppo import STPPOTrainer
from trl_stppo.trainer.training_loop import TrainingLoop

SGD = {"optim": "sgd", "num_mini_batches": 1, "num_ppo_epochs": 3, "max_steps": 6}


class Loop(TrainingLoop):
    """Counts passes of policy and reference."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.references = self.olds = 0

    def logprobs_under(self, model, batch):
        self.olds += model is self.host.model
        self.references += model is not self.host.model
        return super().logprobs_under(model, batch)


def lengths(completion_ids, **kwargs):
    return [float(len(ids) + ids[0] % 3) for ids in completion_ids]


def trained(folder, loop, **options):
    kind = type("Trainer", (STPPOTrainer,), {"loop_class": loop})
    arguments = {"reward_funcs": lengths}
    trainer = build(folder, kind, arguments=arguments, **{**SGD, **options})
    trainer.train()
    return trainer


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize(("epochs", "kl_coef", "passes"), [(1, 0.0, 0), (1, 0.05, 2), (3, 0.0, 2)])
def test_old_log_probabilities_are_computed_if_something_reads_them(tmp_path, epochs, kl_coef, passes):
    trainer = trained(tmp_path, Loop, kl_coef=kl_coef, num_ppo_epochs=epochs, max_steps=2 * epochs)
    assert trainer._loop.olds == passes
    assert ("old_per_token_logps" in trainer._buffered_inputs[0]) == (passes > 0)
    ratios = [e["policy/ratio_max"] for e in trainer.state.log_history if "policy/ratio_max" in e]
    assert ratios[0] == pytest.approx(1.0, abs=1e-5)


def test_later_mini_batches_need_the_old_ones_before_the_update(tmp_path):
    trainer = trained(tmp_path, Loop, kl_coef=0.0, num_mini_batches=2, num_ppo_epochs=1, max_steps=4)
    assert trainer._loop.olds == 2
