"""An agent's processor: saved with the policy, loaded with it, and used as in the run's evaluation."""

import pytest
import torch
from huggingface_hub import metadata_load
from peft import LoraConfig
from PIL import Image
from transformers import AutoConfig

from tests.kit.vision import picture, vision_model
from tests.kit.vision_runs import Pictures, own_table, rows, vision_trainer
from trl_stppo import Agent
from trl_stppo.hub.loading import model_class
from trl_stppo.hub.settings import AgentSettings

OPTIONS = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": 1,
    "save_strategy": "steps", "save_steps": 1,
}  # fmt: skip
LIMITS = {"max_turns": 3, "max_turn_tokens": 8, "max_completion_length": 400}


@pytest.mark.parametrize("family", ["LLaVA", pytest.param("Idefics3", marks=pytest.mark.long)])
def test_an_agent_plays_the_runs_evaluation(family, tmp_path):
    trainer = vision_trainer(tmp_path, family, **OPTIONS)
    trainer.train()
    expected = trainer.evaluate(rows(4))
    trainer.save_model()
    for folder in (tmp_path, tmp_path / "checkpoint-1"):
        agent = Agent.from_pretrained(str(folder))
        assert type(agent.processing_class) is type(trainer.processing_class)
        options = {"seed": agent.settings.seed, "greedy": False}
        found = agent.evaluate(Pictures, {"own": rows(4)}, **options)["own"]
        assert found["episode/score"] == pytest.approx(expected["eval_episode/score"], abs=1e-6)


@pytest.mark.long
def test_an_adapter_is_an_agent_that_sees_with_its_base(tmp_path):
    model, processor = vision_model("LLaVA")
    model.save_pretrained(tmp_path / "base")
    processor.save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    adapted = tmp_path / "adapted"
    trainer = vision_trainer(adapted, "LLaVA", model=str(tmp_path / "base"), peft_config=lora, **OPTIONS)
    trainer.train()
    trainer.save_model()
    first = Agent.from_pretrained(str(adapted)).run(Pictures, rows(1)[0])
    # Without its own processor, the base model's is loaded.
    for name in ("processor_config.json", "tokenizer_config.json", "tokenizer.json"):
        (adapted / name).unlink()
    assert Agent.from_pretrained(str(adapted)).run(Pictures, rows(1)[0]).ids == first.ids


@pytest.fixture(scope="module", params=["LLaVA", "Gemma 3"])
def agent(request):
    return Agent(*vision_model(request.param), AgentSettings(**LIMITS))


def test_an_episode_shows_images_of_pillow(agent):
    episode = agent.run(Pictures, rows(1)[0])
    assert isinstance(episode.prompt[-1]["content"][1]["image"], Image.Image)
    shown = [m["content"] for m in episode.messages if m["role"] == "user"]
    assert all(isinstance(content[1]["image"], Image.Image) for content in shown)
    assert "user: now [image 16x16]" in str(episode)


def asked(seed):
    content = [{"type": "image", "image": picture(seed)}, {"type": "text", "text": "what?"}]
    return [{"role": "user", "content": content}]


def test_greedy_turns_are_the_likeliest_tokens_of_the_models_own_pass(agent):
    episode, reader = agent.run(Pictures, rows(1)[0]), agent.reader
    # No turn follows the last image.
    seen = [reader.read(picture) for picture in pictures_of(episode.messages)[:3]]
    assert len(episode.turn_spans) == 3
    first, row = len(episode.prompt_ids), episode.prompt_ids + episode.ids
    table = own_table(agent.model, reader, row, seen)
    table[:, reader.image_id] = -torch.inf
    for start, end in episode.turn_spans:
        likeliest = table[first + start - 1 : first + end - 1].argmax(-1)
        assert likeliest.tolist() == episode.ids[start:end]


def pictures_of(messages):
    blocks = [b for m in messages if isinstance(m["content"], list) for b in m["content"]]
    return [block["image"] for block in blocks if block["type"] == "image"]


def test_the_next_turn_answers_the_image():
    agent = Agent(*vision_model("LLaVA"), AgentSettings(**LIMITS))
    answers = [agent.act(asked(seed)) for seed in (0, 1, 2, 0)]
    assert len({*answers}) > 1
    assert answers[0] == answers[3]


def test_text_models_and_vision_models_get_their_class():
    kinds = [("LlavaForConditionalGeneration", "ImageText"), ("Qwen2ForCausalLM", "Causal")]
    for architecture, named in kinds:
        config = AutoConfig.for_model("qwen2", architectures=[architecture])
        assert named in model_class(config).__name__


def test_the_card_names_the_pipeline(tmp_path):
    trainer = vision_trainer(tmp_path, "LLaVA", **OPTIONS)
    trainer.create_model_card()
    assert metadata_load(tmp_path / "README.md")["pipeline_tag"] == "image-text-to-text"
    assert "## Settings" in (tmp_path / "README.md").read_text()
