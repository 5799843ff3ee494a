"""Weights that are not finite are never saved, and said clearly."""

import math

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from tests.kit.builders import LIMITS, TEXT
from tests.kit.builders import build as build_playing
from tests.kit.fakes import char_tokenizer, tiny_policy
from tests.kit.guard_kit import build
from tests.kit.outages import saved
from tests.kit.tiers import quick
from trl_stppo import PPOTrainer
from trl_stppo.errors import NonFiniteError
from trl_stppo.trainer.guards import endings
from trl_stppo.trainer.guards.endings import first_not_finite


def policy_with(value: float, name: str = "model.layers.1.mlp.up_proj.weight"):
    model = tiny_policy(char_tokenizer())
    model.get_parameter(name).data[0, 1] = value
    return model


class Packed(nn.Parameter):
    """Of a quantised model: its bits are no numbers."""


def test_large_weights_and_the_bits_of_quantised_ones_are_none_of_it(tmp_path):
    model = policy_with(1e30)
    trainer = build_playing(tmp_path, arguments={"model": model})
    packed = Packed(torch.full((2,), math.nan), requires_grad=False)
    trainer.model.register_parameter("packed", packed)
    assert first_not_finite(trainer.model, trainer.critic, trainer.accelerator) is None


def spoil(*steps: int, critic: bool = False, value: float = math.inf):
    """The optimizer writes a number that is none at these steps, from 1 on."""

    def poison(trainer, due):
        class Spoils(TrainerCallback):
            def on_optimizer_step(self, args, state, control, **kwargs):
                if state.global_step + 1 in steps:
                    model = trainer.critic.model if critic else trainer.model
                    next(model.parameters()).data[0, 0] = value

        trainer.add_callback(Spoils())

    return poison


SPOILT = [(critic, value) for critic in (False, True) for value in (math.inf, math.nan)]


@pytest.mark.long
@pytest.mark.parametrize(("critic", "value"), quick(SPOILT, (False, math.nan), (True, math.inf)))
def test_weights_that_are_not_finite_are_not_saved(critic, value, tmp_path):
    save = {"save_strategy": "steps", "save_steps": 2}
    trainer, _ = build(tmp_path, spoil(6, critic=critic, value=value), **save)
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    name = "critic: transformer.wte.weight" if critic else "policy: transformer.wte.weight"
    for part in (
        f"Weights are not finite after step 6, first in the {name}; they are not saved",
        f"the last good checkpoint is {tmp_path / 'checkpoint-3'}",
    ):
        assert part in str(caught.value)
    assert trainer.stop_reason.startswith("not finite: the weights after step 6")
    assert saved(tmp_path) == ["checkpoint-3"]
    assert not (tmp_path / "_incomplete").exists()
    again, _ = build(tmp_path, **save)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6


@pytest.mark.parametrize("engine", [True, False])
def test_the_next_rollout_is_not_played_with_them(engine, tmp_path):
    one_step = {"num_mini_batches": 1, "num_ppo_epochs": 1, "max_steps": 4}
    if engine:
        trainer = build_playing(tmp_path, arguments=TEXT, **one_step, **LIMITS)
        spoil(2)(trainer, None)
    else:
        trainer, _ = build(tmp_path, spoil(2), **one_step)
    with pytest.raises(NonFiniteError, match=r"after step 2, first in the policy.*checkpoint is none"):
        trainer.train()


def test_a_checkpoint_of_such_weights_is_told_from_a_good_one(tmp_path, monkeypatch):
    """As earlier versions have written them."""
    save = {"save_strategy": "steps", "save_steps": 4, "max_steps": 4}
    with monkeypatch.context() as patch:
        patch.setattr(endings, "first_not_finite", lambda *a, **k: None)
        build(tmp_path, spoil(4), **save)[0].train()
    trainer, _ = build(tmp_path)
    with pytest.raises(NonFiniteError, match=r"they come from .*checkpoint-4, which is not a good"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.long
def test_logits_that_are_not_finite_end_the_run_with_a_checkpoint(tmp_path):
    """Of finite weights: numbers that grow too large on their way."""
    trainer = build_playing(tmp_path, PPOTrainer, arguments=TEXT, max_steps=6, **LIMITS)

    def overflow(module, args, output):
        return output * (math.inf if trainer.state.global_step == 4 else 1.0)

    trainer.model.model.norm.register_forward_hook(overflow)
    with pytest.raises(NonFiniteError) as caught:
        trainer.train()
    for part in (
        "Logits of episode",
        "The run ends after step 4.",
        f"is saved in {tmp_path / 'checkpoint-4'}",
        "bf16=False",
        "bf16=False",
    ):
        assert part in str(caught.value)
    assert saved(tmp_path) == ["checkpoint-4"]
