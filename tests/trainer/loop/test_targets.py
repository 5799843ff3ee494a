"""What a training's advantages are made of: the end of an episode, whitened rewards, the critic's share."""

import pytest
import torch

from tests.kit.scripted import Float64Trainer, play_script, scripted_trainer
from trl_stppo.core import num_turns
from trl_stppo.trainer.training_loop import TrainingLoop

PLAIN = {"lam": 1.0, "kl_coef": 0.0, "staleness": 0.0}


class KeepingLoop(TrainingLoop):
    """Keeps what the first rollout batch was trained on."""

    def rollout_values(self, batch):
        self.host.values = super().rollout_values(batch)
        return self.host.values

    def targets(self, batch, turns, *args):
        self.host.turns, self.host.targets = turns, super().targets(batch, turns, *args)
        return self.host.targets


class Kept(Float64Trainer):
    loop_class = KeepingLoop


def trained(folder, **options) -> Kept:
    trainer, _ = scripted_trainer(folder, trainer_class=Kept, **{**PLAIN, **options})
    trainer.train()
    return trainer


def test_a_truncated_episode_has_the_critics_value_behind_it_and_one_that_has_ended_nothing(
    tmp_path,
):
    def half_of_them_end(prompts, trainer=None):
        return {**play_script(prompts), "terminated": [i % 2 == 0 for i in range(len(prompts))]}

    trainer = trained(tmp_path, rollout_func=half_of_them_end, bootstrap_truncated=True)
    turns, targets, (_, final) = trainer.turns, trainer.targets, trainer.values
    assert turns.terminated.tolist() == [i % 2 == 0 for i in range(len(final))]
    assert final.abs().min() > 1e-6, "the case should be interesting"
    for b, mask in enumerate(turns.action_mask):
        last = int(mask.nonzero()[-1])
        behind = 0.0 if turns.terminated[b] else final[b].item()
        expected = targets.rewards[b, last].item() + behind
        assert targets.returns[b, last].item() == pytest.approx(expected, rel=1e-9), b


def test_whitened_rewards_keep_their_mean(tmp_path):
    kept = trained(tmp_path / "plain")
    mask, plain = kept.turns.action_mask, kept.targets.rewards
    assert plain[mask].mean().abs() > 1e-3, "the case should be interesting"
    white = trained(tmp_path / "white", whiten_rewards=True).targets.rewards[mask]
    assert white.mean().item() == pytest.approx(plain[mask].mean().item(), rel=1e-6)
    assert white.std().item() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("level", ["token", "turn"])
def test_an_unset_lambda_is_0_9_per_turn(tmp_path, level):
    options = {"variant": "st-ppo", "advantage_level": level}
    kept = trained(tmp_path / "unset", lam=None, **options)
    steps = kept.turns.action_mask.sum() if level == "token" else num_turns(kept.turns.turn_index).sum()
    lam = 0.9 ** float(num_turns(kept.turns.turn_index).sum() / steps)
    assert (lam > 0.91) == (level == "token"), "the case should be interesting"
    given = trained(tmp_path / "given", lam=lam, **options)
    assert torch.allclose(kept.targets.raw_advantages, given.targets.raw_advantages, atol=1e-12)
