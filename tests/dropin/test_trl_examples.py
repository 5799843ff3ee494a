"""TRL's example scripts themselves, from a checkout that TRL_EXAMPLES names (its folder examples/scripts)."""

import os
from pathlib import Path

import pytest

from tests.kit.dropin_kit import PPO, run, with_ours
from tests.kit.dropin_models import agent_model, plain_models, save_split, texts
from tests.kit.dropin_servers import install
from tests.kit.tool_model import call
from tests.kit.vision import picture, vision_model

FOLDER = Path(os.environ.get("TRL_EXAMPLES", "TRL_EXAMPLES is not set"))
SHORT = {"use_cpu": True, "bf16": False, "report_to": ["none"], "disable_tqdm": True}
AGENTS = {
    "grpo_2048.py": ("Qwen3-4B", [call("move", direction=way) for way in ("left", "up")], ""),
    "openenv/echo.py": ("Qwen3-0.6B", [call("echo", message="Hello World!")], ""),
    "openenv/catch.py": (
        "Qwen2.5-0.5B-Instruct",
        [call("move", direction="left"), call("stay")],
        "--env-mode space --env-host http://localhost --dataset-size 16",
    ),
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason=f"{FOLDER} is no folder with TRL's examples"),
]


@pytest.fixture
def ppo_words(tmp_path) -> list[str]:
    policy, reward = plain_models(tmp_path)
    return f"""
        --output_dir out --model_name_or_path {policy} --sft_model_path {policy}
        --reward_model_path {reward} --learning_rate 3e-6 --per_device_train_batch_size 4
        --gradient_accumulation_steps 1 --total_episodes 8 --missing_eos_penalty 1.0
    """.split()


def test_ppo(ppo_words, tmp_path, monkeypatch):
    columns = {name: texts(116) for name in ("prompt", "chosen", "rejected")}
    save_split(tmp_path / "words", "descriptiveness", columns)
    words = [*ppo_words, "--dataset_name", "words", "--dataset_train_split", "descriptiveness"]
    words += ["--response_length", "12"]
    trainer = run(FOLDER / "ppo" / "ppo.py", words, tmp_path, monkeypatch, PPO, **SHORT)
    assert trainer.state.global_step == 8
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("extra", ["", "--use_peft --lora_target_modules query_key_value dense"])
def test_ppo_tldr(extra, ppo_words, tmp_path, monkeypatch):
    for split, rows in (("train", 20), ("validation", 6)):
        save_split(tmp_path / "posts", split, {"prompt": texts(rows), "completion": texts(rows)})
    words = ["--dataset_name", "posts", "--dataset_test_split", "validation", "--stop_token", "eos"]
    words += ["--response_length", "12", "--eval_strategy", "steps", "--eval_steps", "4"]
    words = [*ppo_words, *words, *extra.split()]
    trainer = run(FOLDER / "ppo" / "ppo_tldr.py", words, tmp_path, monkeypatch, PPO, **SHORT)
    assert trainer.state.global_step == 8
    assert any("eval_episode/score" in entry for entry in trainer.state.log_history)


@pytest.mark.parametrize("kind", ["STPPO", "STGRPO"])
def test_gspo_with_the_flags_of_its_docstring(kind, tmp_path, monkeypatch):
    """But for ZeRO-3, lengths and batches; its reward by math-verify is not installed here."""
    model = agent_model(tmp_path / "model", ["<think>\nOne.\n</think>\nTwo.", "Two."])
    for split in ("train", "test"):
        rows = {"problem": texts(400), "solution": texts(400), "messages": texts(400)}
        save_split(tmp_path / "AI-MO" / "NuminaMath-TIR", split, rows)
    monkeypatch.setattr("trl.rewards.accuracy_reward", lambda completions, **_: [1.0] * len(completions))
    words = f"""
        --model_name_or_path {model} --output_dir out --learning_rate 1e-5 --dtype float32
        --max_completion_length 16 --use_peft --lora_target_modules q_proj v_proj --log_completions
        --per_device_train_batch_size 4 --num_generations 8 --importance_sampling_level sequence
        --epsilon 3e-4 --epsilon_high 4e-4 --beta 0.0 --loss_type grpo
        --gradient_accumulation_steps 2 --steps_per_generation 8 --max_steps 4
    """.split()
    trainer = run(FOLDER / "gspo.py", words, tmp_path, monkeypatch, with_ours(kind), **SHORT)
    assert trainer.state.global_step == 4
    assert trainer.args.variant == (None if kind == "STPPO" else "gspo")
    assert trainer.importance_sampling_level == "sequence"


@pytest.mark.parametrize("kind", ["STPPO", "STGRPO"])
def test_a_vision_model_with_the_flags_of_its_docstring(kind, tmp_path, monkeypatch):
    """But for ZeRO-3, lengths and batches; its reward by math-verify is not installed here."""
    for part in vision_model("LLaVA"):
        part.save_pretrained(tmp_path / "model")
    seen = [picture(number, 24, 16) for number in range(116)]
    rows = {"problem": texts(116), "solution": texts(116), "image": seen}
    save_split(tmp_path / "lmms-lab" / "multimodal-open-r1-8k-verified", "train", rows)
    monkeypatch.setattr("trl.rewards.accuracy_reward", lambda completions, **_: [1.0] * len(completions))
    words = f"""
        --model_name_or_path {tmp_path / "model"} --output_dir out --learning_rate 1e-5 --dtype float32
        --max_completion_length 16 --use_peft --lora_target_modules q_proj v_proj --log_completions
        --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --num_generations 2 --max_steps 2
    """.split()
    trainer = run(FOLDER / "grpo_vlm.py", words, tmp_path, monkeypatch, with_ours(kind), **SHORT)
    assert trainer.state.global_step == 2
    assert trainer.reader is not None
    assert (tmp_path / "out" / "processor_config.json").is_file()


@pytest.mark.parametrize("kind", ["STPPO", "STGRPO"])
def test_tools(kind, tmp_path, monkeypatch):
    condition = "Aliases_Interactor_A = 'ABC1'"
    asked = call("query_biogrid", sql_command=f"SELECT * FROM interactions WHERE {condition}")
    model = agent_model(tmp_path / "model", [asked, asked, "It is *yes*."])
    names = {"Aliases Interactor A": ["ABC1", "TP53"], "Taxid Interactor A": ["9606", "9606"]}
    save_split(tmp_path / "qgallouedec" / "biogrid", "train", names)
    asks = [f"Does the gene ABC{i} interact with TP53?" for i in range(16)]
    questions = {"question": [*asks, "Why?"], "answer": ["Yes", "No"] * 8 + ["No"]}
    save_split(tmp_path / "qgallouedec" / "biogrid_qa", "train", questions)
    words = f"--model_name_or_path {model} --output_dir out --max_completion_length 512".split()
    words += ["--max_steps", "2"]
    script = FOLDER / "grpo_agent.py"
    trainer = run(script, words, tmp_path, monkeypatch, with_ours(kind), **SHORT)
    log = trainer.state.log_history[0]
    assert log["tools/call_frequency"] > 0
    assert log["tools/failure_frequency"] == 0


@pytest.mark.parametrize("kind", ["STPPO", "STGRPO"])
@pytest.mark.parametrize("script", AGENTS)
def test_environments(script, kind, tmp_path, monkeypatch):
    name, calls, words = AGENTS[script]
    agent_model(tmp_path / "Qwen" / name, [*calls, *calls, "I am done."])
    install(tmp_path, monkeypatch)
    # No GPU here; a few steps; and a group where five rows would not fill a batch.
    forced = {**SHORT, "max_steps": 2, "use_vllm": False, "max_completion_length": 192}
    forced |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    forced["num_generations"] = 2 if kind == "STPPO" else 8
    ours, path = with_ours(kind), FOLDER / script
    trainer = run(path, words.split(), tmp_path, monkeypatch, ours, **forced)
    assert trainer.state.global_step == 2
    assert trainer.state.log_history[0]["tools/call_frequency"] > 0
