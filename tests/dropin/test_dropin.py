"""Scripts that are written for TRL train with our trainers when their import lines change."""

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.kit.dropin_kit import PPO, run, with_ours
from tests.kit.dropin_models import agent_model, plain_models, save_split, texts
from tests.kit.tool_model import call
from trl_stppo import PPOTrainer, STGRPOTrainer, STPPOTrainer

SCRIPTS = Path(__file__).parent / "scripts"
SHORT = {"use_cpu": True, "bf16": False, "report_to": ["none"], "disable_tqdm": True}


def test_a_ppo_script_trains_evaluates_saves_and_prints(tmp_path, monkeypatch, capsys):
    policy, reward = plain_models(tmp_path)
    for split, rows in (("train", 12), ("validation", 4)):
        save_split(tmp_path / "reviews", split, {"prompt": texts(rows)})
    words = f"""
        --dataset_name reviews --dataset_test_split validation --output_dir out --seed 1
        --model_name_or_path {policy} --sft_model_path {policy} --reward_model_path {reward}
        --learning_rate 3e-4 --per_device_train_batch_size 2 --gradient_accumulation_steps 2
        --num_mini_batches 2 --num_ppo_epochs 1 --total_episodes 8 --missing_eos_penalty 1.0
        --stop_token eos --response_length 8 --local_rollout_forward_batch_size 2
        --eval_strategy steps --eval_steps 2
    """.split()
    script = SCRIPTS / "ppo_reviews.py"
    trainer = run(script, words, tmp_path, monkeypatch, PPO, **SHORT)
    assert type(trainer) is PPOTrainer
    assert trainer.state.global_step == 4
    assert any("eval_episode/score" in entry for entry in trainer.state.log_history)
    printed = capsys.readouterr().out
    assert all(word in printed.lower() for word in ("prompt", "completion", "score"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "critic")


@pytest.mark.parametrize("kind", [STPPOTrainer, STGRPOTrainer], ids=lambda k: k._name)
def test_a_script_with_tools_trains(kind, tmp_path, monkeypatch):
    asks = [call("query", command=f"select * from genes where name = '{n}'") for n in ("abc", "xyz")]
    model = agent_model(tmp_path / "model", [*asks, "yes", "no"])
    save_split(tmp_path / "genes", "train", {"name": ["abc", "tp53"], "partner": ["tp53", "abc"]})
    asked = [f"Is {i} bound to abc?" for i in range(20)] + ["What is it?"]
    answers = {"question": asked, "answer": ["Yes", "No"] * 10 + ["No"]}
    save_split(tmp_path / "genes_qa", "train", answers)
    words = f"--model_name_or_path {model} --dataset_name genes --output_dir out --max_steps 2".split()
    ours = with_ours(kind.__name__.removesuffix("Trainer"))
    trainer = run(SCRIPTS / "grpo_lookup.py", words, tmp_path, monkeypatch, ours, **SHORT)
    assert type(trainer) is kind
    log = trainer.state.log_history[0]
    assert log["tools/call_frequency"] > 0
    assert log["tools/failure_frequency"] == 0
    assert {"rewards/correctness/mean", "rewards/evidence/mean", "turns/mean"} <= set(log)
    assert (tmp_path / "out" / "config.json").exists()


def test_a_script_with_environments_lora_and_callbacks_trains(tmp_path, monkeypatch):
    moves = [call("move", direction=way) for way in ("left", "right", "up")]
    agent_model(tmp_path / "walker", [*moves, *moves, "Done."])
    ours, script = with_ours("STPPO"), SCRIPTS / "grpo_corridor.py"
    trainer = run(script, [], tmp_path, monkeypatch, ours, max_steps=4, **SHORT)
    assert trainer.uses_shared_critic
    assert trainer.state.global_step == 4
    log = trainer.state.log_history[0]
    assert 0 < log["tools/failure_frequency"] < 1
    assert log["turns/mean"] > 1


@pytest.mark.parametrize("kind", ["STPPO", "STGRPO"])
def test_trls_own_script_trains(kind, tmp_path, monkeypatch):
    script = Path(importlib.util.find_spec("trl.scripts.grpo").origin)
    model = agent_model(tmp_path / "model", ["<think>\nsix\n</think>\n6", "7"])
    asks = [[{"role": "user", "content": f"What is {i} and {i}?"}] for i in range(16)]
    columns = {"prompt": asks, "solution": [str(2 * i) for i in range(16)]}
    for split in ("train", "test"):
        save_split(tmp_path / "sums", split, columns)
    (tmp_path / "judge.py").write_text(
        "def said_seven(completions, **kwargs):\n"
        "    return [float('7' in c[0]['content']) for c in completions]\n"
    )
    words = f"""
        --model_name_or_path {model} --dataset_name sums --output_dir out --use_peft --lora_r 2
        --reward_funcs judge.said_seven think_format_reward get_soft_overlong_punishment
        --reward_weights 1.0 0.5 0.1 --max_completion_length 16 --max_steps 2
        --eval_strategy steps --eval_steps 2 --logging_steps 1
    """.split()
    trainer = run(script, words, tmp_path, monkeypatch, with_ours(kind), **SHORT)
    log = trainer.state.log_history
    assert any(0 < entry.get("rewards/said_seven/mean", 0) < 1 for entry in log)
    assert any("eval_episode/score" in entry for entry in log)
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
