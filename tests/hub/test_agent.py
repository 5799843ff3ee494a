"""An agent at work: on environments, in one's own loop, with settings of its run or others."""

import json

import pytest
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig, Qwen2ForCausalLM

from tests.hub.hub_kit import letters, logits, run, saved_base
from tests.kit.fakes import CountEnv, char_tokenizer, tiny_config
from tests.trainer.loop.test_tool_environments import TEMPLATE, PayingEnv, call
from trl_stppo import Agent
from trl_stppo.generation.batched import BatchedBackend
from trl_stppo.hub.settings import AgentSettings

ROW = letters()[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder as `save_model` leaves it."""
    folder = tmp_path_factory.mktemp("agent") / "run"
    options = {"temperature": 0.7, "env_timeout_seconds": 9.0, "seed": 5}
    trainer = run(folder, hub_model_id=None, **options)
    trainer.save_model(str(folder))
    return folder


@pytest.fixture
def agent(saved):
    return Agent.from_pretrained(str(saved))


def length(completions, **columns):
    return [float(len(each)) for each in completions]


@pytest.mark.long
def test_evaluate_gives_the_trainers_metrics(tmp_path):
    rows = letters()
    options = {"eval_generation_kwargs": {"temperature": 0.8}, "missing_eos_penalty": 0.5}
    options |= {"num_generations_eval": 2, "reward_weights": [0.25]}
    arguments = {"eval_dataset": rows, "reward_funcs": [length]}
    trainer = run(tmp_path / "run", arguments=arguments, **options)
    trainer.save_model()
    expected = trainer.evaluate()
    agent = Agent.from_pretrained(str(tmp_path / "run"))
    options = {"seed": agent.settings.seed, "greedy": False, "repetitions": 2, "parallel": 3}
    options |= {"reward_weights": [0.25], "missing_eos_penalty": 0.5}
    metrics = agent.evaluate(CountEnv, {"own": rows}, [length], **options)["own"]
    assert metrics["episodes"] == 16
    assert metrics["rewards/length/mean"] > 0.0
    for name in metrics:
        assert metrics[name] == pytest.approx(expected[f"eval_{name}"], abs=1e-6), name


@pytest.mark.parametrize(("env", "reward", "told"), [
    (None, None, True),
    (None, 0.0, False),
    (CountEnv, None, False),
])  # fmt: skip
def test_an_evaluation_without_any_reward_is_told(agent, caplog, env, reward, told):
    def given(completions, **columns):
        return [reward] * len(completions)

    agent.evaluate(env, {"letters": letters()}, [given])
    assert ("No episode has a reward" in caplog.text) is told


class Closable(CountEnv):
    closed = 0

    def close(self) -> None:
        Closable.closed += 1


def test_an_environment_comes_as_class_factory_or_dict(agent):
    expected = agent.run(CountEnv, ROW).ids
    named = {**ROW, "environment": "count"}
    for env, row in ((lambda: CountEnv(), ROW), ({"count": CountEnv}, named)):
        assert agent.run(env, row).ids == expected
    agent.run(Closable, ROW)
    assert Closable.closed == 1


def test_one_leads_the_conversation_oneself(agent):
    episode = agent.run(CountEnv, ROW)
    row = {"prompt": [{"role": "user", "content": ROW["prompt"][0]["content"] + "a"}]}
    assert agent.run(None, row).turns == episode.turns[:1]
    assert agent.run(None, {"prompt": "plain text"}).turns != [""]
    assert len({*(agent.run(None, row, seed=s, greedy=False).turns[0] for s in range(5))}) > 1


def test_tools_are_called_and_pay(saved, monkeypatch):
    agent = Agent.from_pretrained(str(saved), max_completion_length=400, max_turn_tokens=None)
    agent.tokenizer.chat_template = TEMPLATE.read_text()
    agent.model = Qwen2ForCausalLM(tiny_config(agent.tokenizer, max_position_embeddings=4096))
    turns = iter([call("pay", 2.0), call("fail", 1.0), "done"])

    def script(rows, limit, seeds):
        return [agent.tokenizer(next(turns) + "<|im_end|>")["input_ids"]], None

    monkeypatch.setattr(agent._speaker, "backend", lambda sampling: BatchedBackend(script))
    episode = agent.run(PayingEnv, ROW)
    assert episode.rewards == [2.0, 1.0, 0.0]
    assert (episode.final_reward, episode.score) == (10.0, 13.0)
    assert [m["role"] for m in episode.messages].count("tool") == 2


def test_a_model_whose_cache_is_not_ours_generates_the_same(saved, agent, monkeypatch):
    expected = [e.ids for e in agent.run_many(CountEnv, letters())]
    monkeypatch.setattr("trl_stppo.trainer.play.supports", lambda model: "It is another one.")
    other = Agent.from_pretrained(str(saved))
    assert [e.ids for e in other.run_many(CountEnv, letters())] == expected
    assert other.run(CountEnv, ROW, greedy=False).turns


def test_a_lost_base_model_is_named_and_can_be_given(tmp_path):
    base = saved_base(tmp_path / "base")
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    trainer = run(tmp_path / "run", arguments={"model": base, "peft_config": lora})
    trainer.save_model()
    expected = logits(trainer.model)
    (tmp_path / "base").rename(tmp_path / "moved")
    folder = trainer.args.output_dir
    with pytest.raises(ValueError, match=r"could not be loaded.*`base_model`"):
        Agent.from_pretrained(folder)
    agent = Agent.from_pretrained(folder, base_model=str(tmp_path / "moved"))
    assert torch.equal(logits(agent.model), expected)


@pytest.mark.long
def test_a_quantised_policy_comes_back_quantised(tmp_path):
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    wide = tiny_config(char_tokenizer(), hidden_size=64, intermediate_size=64)
    Qwen2ForCausalLM(wide).save_pretrained(tmp_path / "base")
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    in_4_bits = BitsAndBytesConfig(load_in_4bit=True, **nf4)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    arguments = {"model": str(tmp_path / "base"), "peft_config": lora}
    trainer = run(tmp_path / "run", arguments={**arguments, "quantization_config": in_4_bits})
    trainer.save_model()
    agent = Agent.from_pretrained(trainer.args.output_dir)
    assert agent.model.get_base_model().is_loaded_in_4bit
    torch.testing.assert_close(logits(agent.model), logits(trainer.model), rtol=0, atol=1e-5)
    plain = Agent.from_pretrained(trainer.args.output_dir, quantization_config=False)
    assert not getattr(plain.model.get_base_model(), "is_loaded_in_4bit", False)
    assert not torch.allclose(logits(plain.model), logits(agent.model), atol=1e-3)


def test_settings_survive_the_file_and_unknown_keys_are_passed_over(tmp_path):
    settings = AgentSettings(max_turns=4, sampling={"temperature": 0.5}, environments=["a:B"])
    path = settings.save(tmp_path)
    assert AgentSettings.load(tmp_path) == settings
    path.write_text(json.dumps({**json.loads(path.read_text()), "code": "rm -rf /"}))
    assert AgentSettings.load(tmp_path) == settings
    assert AgentSettings.load(tmp_path / "nowhere") is None
