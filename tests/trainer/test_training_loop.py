"""Epochs, logging, evaluation and samples: what happens around the rollouts."""

import torch

from tests.kit.builders import LIMITS, logs, prompts, train
from tests.kit.fakes import CountEnv
from trl_stppo import STPPOTrainer


class SureOfHalf(CountEnv):
    """Solved after two turns, but for the rows whose episode never comes to an end."""

    def reset(self, letter: str = "a", **row: object) -> tuple[str, dict]:
        self.turns = 2 if letter == "a" else 99
        return super().reset(letter, **row)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        text, reward, done, truncated, _ = super().step(action)
        return text, reward, done, truncated, {"success": True} if done else {}


def test_running_out_of_turns_is_no_success(tmp_path):
    """Three of the eight episodes are judged; the others are cut off before."""
    arguments = {
        "environment_factory": SureOfHalf,
        "train_dataset": prompts(letter=list("aaabbbbb")),
    }
    figures = logs(train(tmp_path, STPPOTrainer, arguments=arguments, max_steps=1, **LIMITS))
    assert figures["stop_reason/max_turns"] == 5 / 8
    assert figures["episode/success_rate"] == 3 / 8
    assert "turns/valid_action_rate" not in figures, "this environment does not say"


def test_success_that_no_episode_has_come_to_is_not_logged(tmp_path):
    data = prompts(letter=list("bbbbbbbb"))
    arguments = {"environment_factory": SureOfHalf, "train_dataset": data}
    trainer = train(tmp_path, STPPOTrainer, arguments=arguments, max_steps=1, **LIMITS)
    assert "episode/success_rate" not in logs(trainer)
    assert trainer.state.global_step == 1


def test_the_reference_can_follow_the_policy(tmp_path):
    trainer = train(tmp_path, sync_ref_model=True, ref_model_sync_steps=1,
                    ref_model_mixup_alpha=1.0)  # fmt: skip
    policy, reference = (dict(m.named_parameters()) for m in (trainer.model, trainer.ref_model))
    name = "model.embed_tokens.weight"
    torch.testing.assert_close(reference[name], policy[name])
