"""Evaluation plays the same episodes however it is cut, leaves no trace, and takes all kinds of rows."""

import random
import statistics

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset

from tests.kit.builders import LIMITS, build, prompts, share_of_a
from tests.kit.evaluation_run import Watched, evaluated, figures_of
from tests.kit.fakes import CountEnv, char_tokenizer, float64_value_model
from tests.kit.run_log import comparable
from tests.kit.scripted import numbered_rows, play_script, weights
from tests.kit.tiers import quick
from trl_stppo import Agent
from trl_stppo.hub.settings import AgentSettings


@pytest.mark.long
@pytest.mark.parametrize("case", quick(["text", "answers", "stream"], "text"))
def test_batch_size_changes_no_episode_and_no_figure(case, tmp_path):
    one, first = evaluated(tmp_path, case, per_device_eval_batch_size=16)
    assert len(first.facts) == (10 if case == "text" else 5)
    assert len({(fact.tokens, fact.score) for fact in first.facts}) > 1, "the case should be interesting"
    for size in (1, 4):
        other, second = evaluated(tmp_path, case, per_device_eval_batch_size=size)
        assert second.facts == first.facts
        assert figures_of(other) == figures_of(one)


@pytest.mark.parametrize("case", ["text", "answers"])
def test_a_second_evaluation_of_the_same_weights_plays_the_same(case, tmp_path):
    metrics, trainer = evaluated(tmp_path, case)
    assert figures_of(trainer.evaluate()) == figures_of(metrics)
    trainer.args.seed += 1
    assert figures_of(trainer.evaluate()) != figures_of(metrics)


class DrawingEnv(CountEnv):
    """Pays by a random number of its own, and draws from everything global."""

    def step(self, action):
        noise = random.random() + np.random.rand() + torch.rand(()).item()
        observation, _, *rest = super().step(action)
        return observation, self._random.random() + 0.0 * noise, *rest


def sampled(prompts, completions, **kwargs):
    torch.rand(3), random.random(), np.random.rand()
    return share_of_a(completions)


@pytest.mark.long
@pytest.mark.parametrize("case", quick(["text", "answers", "script"], "script"))
def test_a_run_with_evaluations_is_the_run_without(case, tmp_path):
    arguments = {
        "text": {"environment_factory": DrawingEnv},
        "answers": {"reward_funcs": sampled},
        "script": {"rollout_func": play_script, "train_dataset": numbered_rows()},
    }[case]
    options = dict(LIMITS) if case == "text" else {}
    ends = []
    for evaluates in (False, True):
        given = {**arguments, "value_model": float64_value_model(char_tokenizer()).float()}
        if evaluates:
            given["eval_dataset"] = given.get("train_dataset", prompts(5)).select(range(5))
            options |= {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True,
                        "eval_generation_kwargs": None if case == "script" else {"temperature": 0.5},
                        "per_device_eval_batch_size": 2}  # fmt: skip
        trainer = build(tmp_path, Watched, arguments=given, num_ppo_epochs=2, max_steps=8, **options)
        trainer.train()
        ends.append((weights(trainer), torch.rand(2), random.random(), np.random.rand(), trainer))
    # One before the training and one after each of two updates, although each step asks for one.
    assert sum("eval_episode/score" in e for e in trainer.state.log_history) == 3
    assert len(trainer.facts) == 3 * 5
    for plain, other in zip(ends[0][0].values(), ends[1][0].values(), strict=True):
        assert torch.equal(plain, other)
    assert torch.equal(ends[0][1], ends[1][1])
    assert ends[0][2:4] == ends[1][2:4]
    plain, other = (comparable([e for e in end[4].state.log_history if "loss" in e]) for end in ends)
    assert plain == other


def test_what_a_failed_evaluation_leaves_is_cleared(tmp_path):
    def breaks(completions, **kwargs):
        raise RuntimeError("no reward today")

    trainer = build(
        tmp_path,
        arguments={"eval_dataset": prompts(3)},
        eval_generation_kwargs={"temperature": 0.0},
    )
    trainer.train()
    before = trainer.generation_config, trainer.num_generations_eval, torch.get_rng_state()
    trainer.reward_funcs = [breaks]
    with pytest.raises(RuntimeError, match="no reward today"):
        trainer.evaluate()
    assert trainer.model.training
    assert trainer._evaluator.run is None
    assert trainer.generation_config is before[0]
    assert trainer.num_generations_eval == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert not trainer._metrics["eval"]


@pytest.mark.parametrize(
    "kind", quick(["tokens", "stream", "script", "selected columns"], "stream", "script")
)
def test_every_kind_of_rows_is_evaluated_before_any_training(kind, tmp_path):
    tokens = Dataset.from_dict({"input_ids": [[5, 6, 7], [8, 9], [10]] * 3})
    rows = {
        "tokens": tokens,
        "stream": IterableDataset.from_generator(lambda: iter(prompts(9))),
        "script": numbered_rows(9),
        "selected columns": prompts(9),
    }[kind]
    arguments = {"eval_dataset": rows.take(3) if kind == "stream" else rows.select(range(3))}
    if kind != "stream":
        arguments["train_dataset"] = rows
    if kind == "script":
        arguments["rollout_func"] = play_script
    trainer = build(tmp_path, Watched, arguments=arguments, num_generations_eval=3,
                    remove_unused_columns=kind == "selected columns",
                    dataloader_drop_last=True,
                    # The script plays equal prompts of a call differently.
                    per_device_eval_batch_size=1 if kind == "script" else 2)  # fmt: skip
    metrics = trainer.evaluate()
    assert metrics["eval_episodes"] == 9
    assert metrics["eval_rows"] == 3
    assert sorted(f.name for f in trainer.facts) == [(i, k) for i in range(3) for k in range(3)]
    if kind == "script":
        paid = [sum(play_script([str(i)])["turn_rewards"][0]) for i in range(3)]
        assert metrics["eval_episode/score"] == pytest.approx(statistics.fmean(paid))
        assert metrics["eval_turns/mean"] == pytest.approx((2 + 3 + 2) / 3)
    with pytest.raises(NotImplementedError, match="predict"):
        trainer.predict(rows.take(3))


def test_a_row_name_never_reaches_environments_or_functions(tmp_path):
    seen = []

    class Nosy(CountEnv):
        def reset(self, **row):
            seen.append(set(row))
            return super().reset()

    def nosy(completions, **columns):
        seen.append({k for k, v in columns.items() if isinstance(v, list)})
        return [0.0] * len(completions)

    arguments = {"environment_factory": Nosy, "reward_funcs": nosy, "eval_dataset": prompts(2)}
    build(tmp_path, arguments=arguments, **LIMITS).evaluate()
    assert seen
    assert all(columns <= {"prompt", "prompts", "completion_ids"} for columns in seen)


@pytest.mark.parametrize("generation", [{}, {"min_new_tokens": 1}], ids=["cached", "generate"])
def test_an_agent_plays_the_episodes_of_a_trainers_evaluation(generation, tmp_path):
    """Also if turns go through `generate`, which draws from the global random state."""
    seen = {"trainer": [], "agent": []}

    def watched(who):
        def length(completions, **kwargs):
            seen[who] += [str(completion) for completion in completions]
            return [float(len(str(completion))) for completion in completions]

        return length

    rows = numbered_rows(5)
    arguments = {
        "environment_factory": CountEnv, "reward_funcs": watched("trainer"), "eval_dataset": rows
    }  # fmt: skip
    sizes = {"per_device_eval_batch_size": 4, "num_generations_eval": 2}
    trainer = build(tmp_path, arguments=arguments, generation_kwargs=generation, seed=3, **sizes, **LIMITS)
    trainer.evaluate()
    limits = AgentSettings(
        max_turns=LIMITS["max_turns"], max_turn_tokens=LIMITS["max_turn_tokens"],
        max_completion_length=LIMITS["max_completion_length"],
    )  # fmt: skip
    agent = Agent(trainer.model, char_tokenizer(), limits, generation_kwargs=generation)
    options = {"seed": 3, "greedy": False, "parallel": 4, "repetitions": 2}
    agent.evaluate(CountEnv, {"rows": rows}, [watched("agent")], **options)
    assert len({*seen["agent"]}) > 1
    assert seen["agent"] == seen["trainer"]
