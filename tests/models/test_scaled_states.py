"""A critic's values learn alike, whatever the size of its backbone's states."""

import pytest
import torch
from peft import LoraConfig

from tests.kit.builders import build, logs
from tests.kit.fakes import CountEnv, char_tokenizer, tiny_policy
from trl_stppo import STPPOTrainer
from trl_stppo.models.critic import Critic, SeparateCritic, scalar_head

LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
SETTINGS = {
    "max_turns": 2,
    "max_turn_tokens": 6,
    "max_completion_length": 60,
    "optim": "adamw_torch",
}


class Pays(CountEnv):
    """Pays between a half and one in each of two turns."""

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, 0.5 + 0.5 * (len(action) % 2), *rest


def policy(size: float):
    """The same policy whose last states have this root mean square; Gemma's have 54, SmolLM2's 1.8."""
    model = tiny_policy(char_tokenizer())
    with torch.no_grad():
        model.model.norm.weight.fill_(size)
        model.lm_head.weight.div_(size)
    return model


@pytest.mark.parametrize("lora", [False, True])
def test_values_after_an_update_are_alike_and_within_the_rewards(lora, tmp_path):
    found = []
    for size in (1.0, 50.0):
        arguments = {"model": policy(size), "environment_factory": Pays}
        if lora:
            arguments["peft_config"] = LoraConfig(**LORA)
        trainer = build(
            tmp_path / str(size), STPPOTrainer, arguments=arguments, max_steps=4, learning_rate=1e-6,
            critic_learning_rate=1e-3, kl_coef=0.0, **SETTINGS,
        )  # fmt: skip
        trainer.train()
        assert trainer.uses_shared_critic == lora
        means = [e["value/mean"] for e in trainer.state.log_history if "value/mean" in e]
        assert means[0] == 0.0
        assert 0 < abs(means[1]) < logs(trainer)["value/reward_max_abs"]
        found.append(means[1])
    assert found[0] == pytest.approx(found[1], rel=0.2)


def test_a_state_is_scaled_in_float32_without_weights_and_padding_stays_finite():
    critic, hidden = Critic(), torch.tensor([[[3.0, -4.0], [0.0, 0.0], [3e4, 4e4]]])
    critic.head = scalar_head(2, like=hidden)
    with torch.no_grad():
        critic.head.weight.copy_(torch.tensor([[1.0, 1.0]]))
        values = critic.score(hidden.half())
    root = (12.5) ** 0.5
    expected = [-1 / root, 0.0, 7e4 / (12.5e8) ** 0.5]
    assert values.dtype == torch.float32
    torch.testing.assert_close(values[0], torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_a_given_classifier_is_marked_from_then_on(caplog):
    from tests.kit.fakes import tiny_value_model

    model = tiny_value_model(char_tokenizer())
    SeparateCritic(model)
    SeparateCritic(model)
    assert caplog.text.count("another scale") == 1
