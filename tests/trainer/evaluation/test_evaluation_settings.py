"""Evaluation's own sampling, limits and environments, and what is refused."""

import pytest

from tests.kit.builders import LIMITS, build, prompts, quick_config
from tests.kit.evaluation_run import DiceEnv
from tests.kit.fakes import CountEnv, char_tokenizer, float64_policy
from tests.kit.vllm_server import attach, serving
from trl_stppo.trainer.loop import sampler


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


@pytest.mark.long
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


@pytest.mark.long
def test_the_best_model_is_chosen_by_score_unless_told_otherwise(tmp_path):
    options = {"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps"}
    config = quick_config(tmp_path, eval_steps=1, save_steps=1, **options)
    assert config.metric_for_best_model == "episode/score"
    assert config.greater_is_better is True
    metric = "easy_episode/score"
    trainer = build(tmp_path, arguments={"eval_dataset": {"easy": prompts(2)}}, eval_steps=1,
                    save_steps=1, metric_for_best_model=metric, **options)  # fmt: skip
    trainer.train()
    scores = [e["eval_easy_episode/score"] for e in trainer.state.log_history if f"eval_{metric}" in e]
    assert trainer.state.best_metric == max(scores)
