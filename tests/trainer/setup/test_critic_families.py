"""Separate critics of architectures without a sequence-classification model, and of mixtures of experts."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    BitsAndBytesConfig,
    Cohere2Config,
    Glm4MoeConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from tests.kit.fakes import char_tokenizer, tiny_policy
from tests.kit.scripted import scripted_trainer
from trl_stppo import STPPOTrainer
from trl_stppo.models.critic import SeparateCritic
from trl_stppo.models.critic_models import critic_from_checkpoint, critic_from_policy

IDS = torch.arange(3, 19).unsqueeze(0)
SIZES = {
    "vocab_size": len(char_tokenizer()), "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
CONFIGS = {
    "Cohere2": Cohere2Config(**SIZES),
    "Glm4Moe": Glm4MoeConfig(**SIZES, **EXPERTS, n_routed_experts=4, first_k_dense_replace=1),
    "Qwen3Moe": Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4),
}
CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model, Qwen2PreTrainedModel


class Config(Qwen2Config):
    model_type = "own"


class Body(Qwen2Model):
    config_class = Config


class Policy(Qwen2ForCausalLM):
    config_class = Config
    base_model_prefix = "trunk"

    def __init__(self, config):
        super().__init__(config)
        self.trunk = Body(config)
        del self.model

    def forward(self, input_ids=None, attention_mask=None, logits_to_keep=0, **kwargs):
        hidden = self.trunk(input_ids, attention_mask=attention_mask).last_hidden_state
        return CausalLMOutputWithPast(logits=self.lm_head(hidden[:, -logits_to_keep:]))


from transformers.modeling_outputs import CausalLMOutputWithPast
"""
OPTIONS = {
    "value_model": None, "optim": "adamw_torch", "learning_rate": 1e-2,
    "critic_learning_rate": 1e-2, "max_steps": 2, "save_strategy": "steps", "save_steps": 1,
    "num_ppo_epochs": 1,
}  # fmt: skip


def policy(name: str, dtype=torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype)


@pytest.fixture
def coded(tmp_path, monkeypatch):
    """A folder with a model whose classes and backbone's name are its own."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "coded"
    tiny_policy(char_tokenizer()).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["Policy"]}
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Policy"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(CODE)
    return str(folder)


def weights(trainer) -> dict[str, torch.Tensor]:
    named = {f"policy/{n}": p for n, p in trainer.model.state_dict().items()}
    named |= {f"critic/{n}": p for n, p in trainer.critic.model.state_dict().items()}
    return {name: tensor.clone() for name, tensor in named.items()}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def values(critic) -> torch.Tensor:
    with torch.no_grad():
        return critic.values(IDS, torch.ones_like(IDS), IDS.size(1) - 1)


@pytest.mark.long
@pytest.mark.parametrize("name", ["Cohere2", "Glm4Moe"])
def test_every_family_trains_and_is_saved(name, tmp_path):
    trainer, _ = scripted_trainer(tmp_path / "run", model=policy(name), trainer_class=STPPOTrainer, **OPTIONS)
    start = weights(trainer)
    trainer.train()
    end = weights(trainer)
    assert isinstance(trainer.critic, SeparateCritic)
    still = [n for n in end if torch.equal(start[n], end[n])]
    assert not [n for n in still if "expert" not in n and "bias" not in n]
    assert values(trainer.critic).abs().max() > 1e-4
    # By its name, in a checkpoint of the run, and where the user has saved it.
    trainer.save_model(str(tmp_path / "saved"))
    saved = critic_from_checkpoint(str(tmp_path / "saved" / "critic"))
    assert same(saved.state_dict(), trainer.critic.model.state_dict())
    one, _ = scripted_trainer(
        tmp_path / "named", model=policy(name), trainer_class=STPPOTrainer,
        **{**OPTIONS, "value_model": str(tmp_path / "saved")},
    )  # fmt: skip
    torch.testing.assert_close(values(one.critic), values(trainer.critic))


@pytest.mark.long
@pytest.mark.parametrize("name", ["Cohere2", "Glm4Moe", "Qwen3Moe"])
def test_a_resumed_run_ends_with_the_same_weights(name, tmp_path):
    """Also of experts, which the disk has one by one and the model in one tensor."""
    run = {"model": policy(name), "trainer_class": STPPOTrainer, **OPTIONS}
    trainer, _ = scripted_trainer(tmp_path, **run)
    trainer.train()
    run["model"] = policy(name)
    resumed, _ = scripted_trainer(tmp_path, **run)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert same(weights(resumed), weights(trainer))
    names = resumed.model.config.name_or_path, resumed.critic.model.config.name_or_path
    assert names == ("", ""), "what a model is called stays"


@pytest.mark.parametrize(("name", "dtype"), zip(CONFIGS, ["float32", "bfloat16", "bfloat16"], strict=True))
def test_the_backbone_is_the_policys_bit_by_bit(name, dtype):
    causal = policy(name, getattr(torch, dtype))
    model = critic_from_policy(causal)
    body, own = causal.base_model, model.base_model
    assert type(own) is type(body)
    assert torch.count_nonzero(model.score.weight) == 0
    assert model.score.bias is None
    tensors = dict([*body.named_parameters(), *body.named_buffers()])
    for part, tensor in [*own.named_parameters(), *own.named_buffers()]:
        assert tensor.dtype == tensors[part].dtype, part
        assert torch.equal(tensor, tensors[part]), part
    assert own.get_input_embeddings().weight is not body.get_input_embeddings().weight


def test_plain_transformers_loads_a_critic_and_its_classifiers_are_critics(tmp_path):
    critic_from_policy(tiny_policy(char_tokenizer())).save_pretrained(tmp_path / "critic")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    torch.nn.init.normal_(loaded.score.weight)
    loaded.save_pretrained(tmp_path / "classifier")
    model = critic_from_checkpoint(str(tmp_path / "classifier"))
    assert same(loaded.state_dict(), model.state_dict())


def test_a_causal_checkpoint_starts_a_critic_with_a_head_of_zeros(tmp_path):
    policy("Cohere2").save_pretrained(tmp_path)
    model = critic_from_checkpoint(str(tmp_path))
    assert torch.count_nonzero(model.score.weight) == 0
    assert same(model.model.state_dict(), policy("Cohere2").model.state_dict())


def test_loading_options_go_through(tmp_path):
    policy("Cohere2").save_pretrained(tmp_path)
    options = {"attn_implementation": "eager", "dtype": "bfloat16", "logit_scale": 0.5}
    model = critic_from_checkpoint(str(tmp_path), **options)
    assert model.dtype is torch.bfloat16
    assert model.config._attn_implementation == "eager"
    assert model.config.logit_scale == 0.5
    packed = critic_from_checkpoint(str(tmp_path), quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    kinds = {type(m).__name__ for m in packed.modules()}
    assert "Linear4bit" in kinds
    assert type(packed.score) is torch.nn.Linear, "a head in four bits could not be trained"


def test_a_head_of_another_name_is_not_lost(tmp_path):
    sizes = {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    BertForSequenceClassification(BertConfig(**sizes, is_decoder=True)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a BertForSequenceClassification, whose head is not"):
        critic_from_checkpoint(str(tmp_path))


def test_a_model_without_a_backbone_is_named(tmp_path):
    model = tiny_policy(char_tokenizer())
    model.config.__class__ = type("Odd", (Qwen2Config,), {})
    type(model).base_model_prefix, before = "", type(model).base_model_prefix
    try:
        with pytest.raises(ValueError, match="No critic can be made of a Qwen2ForCausalLM"):
            critic_from_policy(model)
    finally:
        type(model).base_model_prefix = before
        model.config.__class__ = Qwen2Config


@pytest.mark.long
def test_a_model_of_ones_own_code_trains_saves_and_resumes(coded, tmp_path):
    run = {"model": coded, "trainer_class": STPPOTrainer, "trust_remote_code": True, **OPTIONS}
    run["cast_lm_head_to_fp32"] = False
    trainer, _ = scripted_trainer(tmp_path / "run", **run)
    trainer.train()
    assert type(trainer.critic.model).base_model_prefix == "trunk"
    resumed, _ = scripted_trainer(tmp_path / "run", **run)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert same(weights(resumed), weights(trainer))
