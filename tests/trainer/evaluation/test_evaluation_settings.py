"""Evaluation's own sampling, limits and environments, and what is refused."""

import pytest
from transformers import Qwen2ForCausalLM
from trl import GRPOTrainer

from tests.kit.builders import LIMITS, build, prompts, quick_config
from tests.kit.evaluation_run import DiceEnv
from tests.kit.fakes import CountEnv, char_tokenizer, float64_policy, tiny_config
from tests.kit.scripted import numbered_rows, play_script
from tests.kit.vllm_server import attach, serving
from tests.trainer.loop.test_tool_environments import (
    TEMPLATE,
    PayingEnv,
    PayingOnlyTurnsEnv,
    scripted_turn,
)
from trl_stppo.trainer.loop import sampler
from trl_stppo.trainer.planning import plan


@pytest.mark.parametrize("path", ["engine", "answers", "generate", "batched"])
def test_evaluation_can_be_greedy_on_every_path(path, tmp_path, monkeypatch):
    """Token for token what `generate` says without sampling; training goes on as it was."""
    tokenizer = char_tokenizer()
    model = float64_policy(tokenizer)
    model.generation_config.update(do_sample=True, top_k=3, temperature=0.7)
    if path in ("generate", "batched"):
        monkeypatch.setattr(sampler, "supports", lambda model: "not in this test")
    environment = path in ("engine", "batched")
    said = []

    def heard(prompts, completions, completion_ids, **kwargs):
        said.extend(completion_ids)
        return [0.0] * len(prompts)

    arguments = {"model": model, "reward_funcs": heard, "eval_dataset": prompts(3)}
    if environment:
        arguments["environment_factory"] = lambda: CountEnv(turns=1)
    trainer = build(tmp_path, arguments=arguments, temperature=1.3, top_k=20, min_p=0.01,
                    eval_generation_kwargs={"temperature": 0.0, "max_completion_length": 7})  # fmt: skip
    trainer.evaluate()
    config = trainer.generation_config
    assert (config.do_sample, config.temperature, config.top_k) == (True, 1.3, 20)
    assert config.max_new_tokens == 12
    expected = []
    for row in prompts(3):
        row = row["prompt"]
        if environment:
            row = [{**row[0], "content": row[0]["content"] + "a"}]
        ids = tokenizer.apply_chat_template(
            row, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )["input_ids"]
        out = model.generate(ids, do_sample=False, max_new_tokens=7, top_k=None, temperature=None)
        expected.append(out[0, ids.shape[1] :].tolist())
    assert sorted(said) == sorted(expected)
    said.clear()
    trainer.train()
    assert max(map(len, said)) > 7, "training keeps its own length"
    assert len({tuple(ids) for ids in said}) > 3, "training samples"


def test_vllm_gets_evaluations_settings_and_training_its_own_again(tmp_path):
    def brief(prompt, request):
        return [10, 2], [-1.0, -1.0]

    trainer = build(
        tmp_path,
        arguments={"environment_factory": CountEnv, "eval_dataset": prompts(3)},
        temperature=0.8, eval_generation_kwargs={"temperature": 0.0, "max_completion_length": 9},
        max_completion_length=40, max_turns=1,
    )  # fmt: skip
    with serving(brief) as server:
        attach(trainer, server)
        vllm = trainer.vllm_generation
        vllm.generation_kwargs = {"temperature": 0.8, "seed": 4}
        assert trainer.evaluate()["eval_episodes"] == 3
        assert {(r["temperature"], r["max_tokens"]) for r in server.requests} == {(0.0, 9)}
        assert all(r["seed"] == 4 for r in server.requests)
        assert (vllm.temperature, vllm.max_completion_length) == (0.8, 40)
        assert vllm.generation_kwargs == {"temperature": 0.8, "seed": 4}
        assert trainer.vllm_importance_sampling_correction


def test_evaluation_has_environments_of_its_own(tmp_path):
    made = {"train": [], "eval": []}

    def factory(kind):
        def make():
            made[kind].append(DiceEnv())
            return made[kind][-1]

        return make

    for given, expected in (({}, "train"), ({"eval_environment_factory": factory("eval")}, "eval")):
        made["train"].clear()
        trainer = build(
            tmp_path,
            arguments={
                "environment_factory": factory("train"),
                "eval_dataset": prompts(3),
                **given,
            },
            **LIMITS,
        )
        trainer.train()
        trained, resets = list(made["train"]), [env.resets for env in made["train"]]
        trainer.evaluate()
        assert [env.resets for env in trained] == resets, "training's stay as they are"
        players = made[expected] if expected == "eval" else made["train"][len(trained) :]
        assert sum(env.resets for env in players) == 3


class HeldOutTools(PayingEnv):
    """The same tools, another score."""

    final = 3.0


def test_tools_of_evaluation_pay_under_the_names_of_trainings(tmp_path, monkeypatch):
    """Four scripted episodes, one of which is cut; what each earns is worked out by hand."""
    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", scripted_turn)
    monkeypatch.setattr(sampler, "why_not_cached", lambda trainer: "A script answers.")
    tokenizer = char_tokenizer()
    tokenizer.chat_template = TEMPLATE.read_text()
    arguments = {
        "processing_class": tokenizer,
        "model": Qwen2ForCausalLM(tiny_config(tokenizer, max_position_embeddings=4096)),
        "environment_factory": PayingEnv,
        "eval_environment_factory": HeldOutTools,
        "eval_dataset": prompts(4),
    }
    trainer = build(tmp_path, arguments=arguments, per_device_eval_batch_size=3,
                    max_completion_length=800)  # fmt: skip
    metrics = trainer.evaluate()
    assert metrics["eval_rewards/PayingEnv/mean"] == 3.0
    assert metrics["eval_episode/score"] == pytest.approx((7.0 + 24.5 + 33.0 + 0.0) / 4 + 3.0)
    assert metrics["eval_tools/call_frequency"] == (3 + 3 + 2 + 0) / 4
    assert metrics["eval_tools/failure_frequency"] == 2 / 8
    assert metrics["eval_stop_reason/no_action"] == 0.75
    assert metrics["eval_stop_reason/token_budget"] == 0.25
    assert metrics["eval_turns/mean"] == (3 + 3 + 2 + 1) / 4


@pytest.mark.parametrize(("arguments", "message"), [
    ({}, "without an `environment_factory`"),
    ({"environment_factory": PayingEnv}, "each of the same kind"),
    ({"environment_factory": {"a": CountEnv}}, "allowed: those of"),
    ({"rollout_func": play_script}, "without an `environment_factory`"),
])  # fmt: skip
def test_other_kinds_of_environments_are_refused(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        build(tmp_path, arguments={**arguments, "eval_environment_factory": CountEnv})


def test_environments_must_agree_on_having_a_score():
    rollout = plan.RolloutPlan(
        tools={None: PayingOnlyTurnsEnv}, probes={None: PayingOnlyTurnsEnv()}
    )
    with pytest.raises(ValueError, match="`get_reward`"):
        plan.plan_evaluation(None, PayingEnv, rollout)


def test_settings_that_cannot_reach_a_rollout_func_are_refused(tmp_path):
    arguments = {"rollout_func": play_script, "train_dataset": numbered_rows()}
    with pytest.raises(
        ValueError, match=r"`eval_generation_kwargs=.*cannot reach a `rollout_func`"
    ):
        build(tmp_path, arguments=arguments, eval_generation_kwargs={"temperature": 1})


def test_the_best_model_is_chosen_by_score_unless_told_otherwise(tmp_path):
    options = {"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps"}
    config = quick_config(tmp_path, eval_steps=1, save_steps=1, **options)
    assert config.metric_for_best_model == "episode/score"
    assert config.greater_is_better is True
    metric = "easy_episode/score"
    trainer = build(tmp_path, arguments={"eval_dataset": {"easy": prompts(2)}}, eval_steps=1,
                    save_steps=1, metric_for_best_model=metric, **options)  # fmt: skip
    trainer.train()
    scores = [
        e["eval_easy_episode/score"] for e in trainer.state.log_history if f"eval_{metric}" in e
    ]
    assert trainer.state.best_metric == max(scores)
