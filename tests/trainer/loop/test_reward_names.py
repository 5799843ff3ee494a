"""Names of reward functions: in logs each has one of its own, and errors name the function."""

import functools

import pytest

from tests.kit.builders import build, logs, prompts, train
from tests.kit.fakes import CountEnv, char_tokenizer, tiny_policy
from trl_stppo import Agent, STPPOTrainer
from trl_stppo.hub.settings import AgentSettings


def base(completions, value, **kwargs):
    return [value] * len(completions)


def twice(role):
    return {role: [functools.partial(base, value=value) for value in (1.0, 3.0)]}


def test_partials_have_the_name_of_their_function_and_equal_names_are_numbered(tmp_path):
    arguments = {**twice("reward_funcs"), "eval_dataset": prompts(2)}
    trainer = train(tmp_path, STPPOTrainer, arguments=arguments, max_steps=1)
    means = {"rewards/base/mean": 1.0, "rewards/base_2/mean": 3.0}
    assert {name: logs(trainer)[name] for name in means} == means
    evaluated = trainer.evaluate()
    assert {name: evaluated[f"eval_{name}"] for name in means} == means


def test_an_agents_evaluation_numbers_them_too():
    tokenizer = char_tokenizer()
    agent = Agent(tiny_policy(tokenizer), tokenizer, AgentSettings(max_completion_length=4))
    functions = twice("reward_funcs")["reward_funcs"]
    figures = agent.evaluate(None, {"rows": prompts(2)}, functions)["rows"]
    assert (figures["rewards/base/mean"], figures["rewards/base_2/mean"]) == (1.0, 3.0)


def test_equal_names_of_turn_rewards_are_numbered_too(tmp_path):
    arguments = {**twice("turn_reward_funcs"), "environment_factory": CountEnv}
    trainer = train(tmp_path, STPPOTrainer, arguments=arguments, max_steps=1, max_turns=2)
    found = logs(trainer)
    assert (found["rewards/base/turn_mean"], found["rewards/base_2/turn_mean"]) == (1.0, 3.0)


def late(completions, **kwargs):
    raise TimeoutError


async def later(completions, **kwargs):
    raise TimeoutError


@pytest.mark.parametrize("role", ["reward_funcs", "turn_reward_funcs"])
@pytest.mark.parametrize("func", [late, later])
def test_an_error_without_words_names_its_function(role, func, tmp_path):
    arguments = {role: func, **({} if role == "reward_funcs" else {"reward_funcs": None})}
    trainer = build(tmp_path, STPPOTrainer, arguments=arguments)
    with pytest.raises(TimeoutError) as caught:
        trainer.train()
    assert f"`{func.__name__}`" in str(caught.value)


def test_another_error_keeps_its_words(tmp_path):
    def broken(completions, **kwargs):
        raise KeyError("answer")

    with pytest.raises(KeyError, match="answer") as caught:
        train(tmp_path, STPPOTrainer, arguments={"reward_funcs": broken})
    assert caught.value.__notes__ == ["in the reward function `broken`"]
