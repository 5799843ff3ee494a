"""Push, load, run and go on training, all through a Hub on this machine and the real client."""

import pytest
import torch
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from tests.hub.hub_kit import REPO, letters, logits, run, saved_base, values
from tests.kit.fakes import CountEnv
from trl_stppo import Agent
from trl_stppo.models.critic import SharedCritic

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]}


def played(trainer, rows):
    """Tokens of the trainer's evaluation, by row."""
    kept = {}

    def remember(*args, original=trainer._player.eval_engine.run, **kwargs):
        episodes, record = original(*args, **kwargs)
        names = args[6] if len(args) > 6 else kwargs["names"]
        kept.update({name[0]: e for name, e in zip(names, episodes, strict=True)})
        return episodes, record

    trainer._player.eval_engine.run = remember
    trainer.evaluate(rows)
    return [(kept[i].prompt_ids, kept[i].ids) for i in range(len(rows))]


@pytest.mark.long
def test_push_load_run_and_train_on(hub, tmp_path):
    rows = letters()
    trainer = run(tmp_path / "run", arguments={"eval_dataset": rows}, max_steps=4)
    trainer.train()
    expected = played(trainer, rows)
    trainer.push_to_hub(dataset_name="me/letters")
    said = values(trainer)

    # Plain transformers.
    model = AutoModelForCausalLM.from_pretrained(REPO)
    assert torch.equal(logits(model), logits(trainer.model))

    # The agent plays what the evaluation has played, token for token.
    agent = Agent.from_pretrained(REPO)
    words = "say a\nOK"
    assert agent.tokenizer(words) == trainer._tokenizer(words)
    episodes = agent.run_many(CountEnv, rows, seed=trainer.args.seed, parallel=3)
    assert [(e.prompt_ids, e.ids) for e in episodes] == expected
    assert agent.run(CountEnv, rows[2]).ids == expected[2][1]
    assert agent.settings.max_turn_tokens == 4

    files = hub.repos[REPO].files
    card = ModelCard(files["README.md"].decode())
    assert f"from_pretrained('{REPO}')" in card.text
    assert "## Results" in card.text
    assert card.data.datasets == "me/letters"
    assert {"trl", "stppo", "reinforcement-learning", "multi-turn"} <= set(card.data.tags)
    assert not [path for path in files if "checkpoint" in path or path.startswith(("_", "trace"))]

    # Training goes on from the repository, with its critic.
    arguments = {"model": REPO, "value_model": REPO, "processing_class": agent.tokenizer}
    onward = run(tmp_path / "onward", arguments=arguments, hub_model_id=None)
    torch.testing.assert_close(values(onward), said, rtol=0, atol=0)
    assert torch.equal(logits(onward.model), logits(trainer.model))
    onward.train()
    assert not torch.equal(values(onward), said)


@pytest.mark.long
def test_an_adapter_with_its_shared_critic(hub, tmp_path):
    base = saved_base(tmp_path / "base", seed=3)
    rows = letters()
    arguments = {"model": base, "peft_config": LoraConfig(**LORA), "eval_dataset": rows}
    trainer = run(tmp_path / "run", arguments=arguments, max_steps=4)
    trainer.train()
    expected, said = played(trainer, rows), values(trainer)
    trainer.push_to_hub()
    policy = logits(trainer.model)
    files = set(hub.repos[REPO].files)
    assert {"adapter_model.safetensors", "critic/adapter_model.safetensors"} <= files
    assert "critic/value_head.safetensors" in files
    assert not [path for path in files if path.startswith("ref/")]

    # Whoever loads it plainly gets the policy.
    fresh = AutoModelForCausalLM.from_pretrained(base)
    assert not torch.allclose(logits(fresh), policy)
    for model in (
        PeftModel.from_pretrained(fresh, REPO),
        AutoPeftModelForCausalLM.from_pretrained(REPO),
        AutoModelForCausalLM.from_pretrained(REPO),
    ):
        torch.testing.assert_close(logits(model), policy, rtol=0, atol=1e-6)
    agent = Agent.from_pretrained(REPO)
    episodes = agent.run_many(CountEnv, rows, seed=trainer.args.seed)
    assert [(e.prompt_ids, e.ids) for e in episodes] == expected

    arguments = {"model": REPO, "value_model": REPO, "processing_class": None}
    onward = run(tmp_path / "onward", arguments=arguments, hub_model_id=None)
    assert isinstance(onward.critic, SharedCritic)
    torch.testing.assert_close(values(onward), said, rtol=0, atol=0)
    torch.testing.assert_close(logits(onward.model), policy, rtol=0, atol=0)
    onward.train()
    assert not torch.equal(values(onward), said)
    assert not torch.equal(logits(onward.model), policy)
    # Its reference is a copy of what it came with: a part of checkpoints, not of the model.
    assert "ref" in onward.model.peft_config
    onward.save_model()
    assert not (tmp_path / "onward" / "ref").exists()


def test_a_shared_critic_needs_a_policy_with_an_adapter(hub, tmp_path):
    base = saved_base(tmp_path / "base")
    lora = {"model": base, "peft_config": LoraConfig(**LORA)}
    run(tmp_path / "run", arguments=lora).push_to_hub()
    with pytest.raises(ValueError, match=r"adapter on the backbone of a LoRA policy.*`model` too"):
        run(tmp_path / "other", arguments={"value_model": REPO})
