"""Every kind of adapter that LoraConfig can describe either trains rightly or is refused by name."""

import copy
import re

import pytest
import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.kit.fakes import char_tokenizer, tiny_policy, tiny_value_model
from tests.kit.scripted import LEARNS, STEPS, batch_logprobs, scripted_trainer
from tests.kit.tiers import quick

pytest.importorskip("peft", minversion="0.21")
from peft.tuners.lora.config import KasaConfig, MontecloraConfig, VeloraConfig

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
RUN = {**LEARNS, "staleness": 0.0, "save_strategy": "steps", "save_steps": 2}
IDS = torch.arange(3, 19).unsqueeze(0)
FRESH = {
    "dora": {"use_dora": True},
    "patterns": {
        "use_rslora": True,
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"q_proj": 16},
    },
    "regex and dropout": {"target_modules": r".*\.(q|v)_proj", "lora_dropout": 0.1},
    "some layers": {
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "layers_to_transform": [1],
        "exclude_modules": ["q_proj"],
    },
    "parameters": {
        "target_modules": [],
        "target_parameters": ["q_proj.weight", "down_proj.weight"],
    },
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "whole modules": {"modules_to_save": ["lm_head", "embed_tokens", "norm"]},
    "tokens": {"trainable_token_indices": [10, 20]},
    "lora_bias": {"target_modules": ["q_proj", "v_proj"], "lora_bias": True},
    "random": {"init_lora_weights": False},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "kasa": {"kasa_config": KasaConfig()},
    "velora": {"velora_config": VeloraConfig(num_groups=2)},
}
PLAIN = ("regex and dropout", "some layers", "orthogonal", "velora")
# Adapters that have been trained before, in a PeftModel.
GIVEN = {
    "given embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "given modules": {"modules_to_save": ["norm"], "trainable_token_indices": [10, 20]},
    "given pissa": {"init_lora_weights": "pissa"},
}


class Run:
    """A trainer of one kind of adapter, and what it was before the training."""

    def __init__(self, kind, folder):
        self.kind, self.folder = kind, folder
        self.base = folder / "base"
        tiny_policy(char_tokenizer()).save_pretrained(self.base)
        self.trainer, self.recorder = self.make()
        self.initial = copy.deepcopy(self.trainer.model).eval()
        self.initial.get_base_model().__dict__.pop("forward", None)
        self.named = {n: p.detach().clone() for n, p in self.trainer.model.named_parameters()}
        self.policy = [n for n in self.recorder_names() if n.startswith("policy/")]
        self.trainer.train()

    def make(self):
        model = AutoModelForCausalLM.from_pretrained(self.base)
        if self.kind in GIVEN:
            model = trained_adapter(model, **GIVEN[self.kind])
            return scripted_trainer(self.folder / "run", model=model, peft_config=None, **RUN)
        config = LoraConfig(**{**LORA, **FRESH[self.kind]})
        return scripted_trainer(self.folder / "run", model=model, peft_config=config, **RUN)

    def recorder_names(self):
        trainable = {n for n, p in self.trainer.model.named_parameters() if p.requires_grad}
        return [f"policy/{n}" for n in trainable - set(self.trainer.critic.parameter_names)]


def trained_adapter(model, adapter_name="default", **options):
    """A PeftModel whose adapter, all of it, already does something."""
    torch.manual_seed(3)
    model = get_peft_model(model, LoraConfig(**{**LORA, **options}), adapter_name=adapter_name)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    return model


NOW = ("parameters", "given modules")


@pytest.fixture(scope="module", params=quick([*FRESH, *GIVEN], *NOW))
def run(request, tmp_path_factory):
    return Run(request.param, tmp_path_factory.mktemp("run"))


@torch.no_grad()
def values_of(trainer):
    with trainer.critic.active():
        return trainer.critic.values(IDS, torch.ones_like(IDS), IDS.size(1) - 1)


def test_all_that_policy_and_critic_train_moves_and_nothing_else(run):
    last = run.recorder.after[-1]
    assert set(run.policy) <= last.keys()
    assert sum(name.startswith("critic/") for name in last) > 2
    for name, weight in run.recorder.before.items():
        assert torch.isfinite(last[name]).all(), name
        assert not torch.equal(last[name], weight), name
    trained = {n.removeprefix("policy/") for n in run.policy} | set(run.trainer.critic.parameter_names)
    for name, weight in run.trainer.model.named_parameters():
        if name not in trained:
            assert torch.equal(weight, run.named[name]), name


def test_the_reference_is_the_policy_as_it_was_at_the_start(run):
    for step in (0, STEPS - 1):
        batch = run.recorder.batches[step]
        recorded = batch["ref_per_token_logps"] * batch["completion_mask"]
        torch.testing.assert_close(recorded, batch_logprobs(run.initial, batch), rtol=0, atol=1e-4)
    late = run.recorder.batches[-1]
    gap = (late["old_per_token_logps"] - late["ref_per_token_logps"]).abs().max()
    assert gap > 1e-3, "the policy should have moved away by then"


def test_the_final_folder_loads_as_the_policy(run):
    run.trainer.save_model(str(run.folder / "final"))
    base = AutoModelForCausalLM.from_pretrained(run.base)
    loaded = PeftModel.from_pretrained(base, run.folder / "final").eval()
    with torch.no_grad():
        expected = run.trainer.model.eval()(IDS).logits
        torch.testing.assert_close(loaded(IDS).logits, expected, rtol=0, atol=1e-4)
    run.trainer.model.train()


@pytest.mark.long
def test_a_resumed_run_ends_where_the_uninterrupted_one_did(run):
    if run.kind in PLAIN:
        pytest.skip("its tensors are those of plain LoRA")
    resumed, recorder = run.make()
    resumed.train(resume_from_checkpoint=str(run.folder / "run" / "checkpoint-2"))
    assert len(recorder.after) == STEPS - 2
    for name, weight in run.recorder.after[-1].items():
        assert torch.equal(recorder.after[-1][name], weight), name


def test_values_ignore_what_the_policy_trains(run):
    before = values_of(run.trainer)
    assert before.std() > 0
    saved = {}
    with torch.no_grad():
        for name in run.policy:
            parameter = run.trainer.model.get_parameter(name.removeprefix("policy/"))
            saved[parameter] = parameter.detach().clone()
            parameter += 0.1 * torch.randn_like(parameter)
        after = values_of(run.trainer)
        for parameter, weight in saved.items():
            parameter.copy_(weight)
    assert torch.equal(after, before)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_critic_beside_a_split_base_starts_from_the_whole_one(init, tmp_path):
    """Without what was moved into the policy's adapter its backbone would lack the largest parts."""
    model = tiny_policy(char_tokenizer())
    with torch.no_grad():
        whole = model.model(IDS).last_hidden_state
    config = LoraConfig(**LORA, init_lora_weights=init)
    trainer, _ = scripted_trainer(tmp_path, model=model, peft_config=config, **RUN)
    with torch.no_grad():
        policy = trainer.model.get_base_model().model(IDS).last_hidden_state
        with trainer.critic.active():
            hidden = trainer.critic.hidden_states(IDS, torch.ones_like(IDS))
    torch.testing.assert_close(policy, whole, rtol=0, atol=1e-4)
    torch.testing.assert_close(hidden, whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("neutral", [True, False])
def test_other_kinds_of_adapter_work_with_a_critic_of_its_own(neutral, tmp_path):
    model = tiny_policy(char_tokenizer())
    config = IA3Config(
        target_modules=["k_proj", "down_proj"],
        feedforward_modules=["down_proj"],
        init_ia3_weights=neutral,
        task_type="CAUSAL_LM",
    )
    value_model = tiny_value_model(char_tokenizer())
    trainer, recorder = scripted_trainer(
        tmp_path, model=model, peft_config=config, value_model=value_model, **RUN
    )
    initial = copy.deepcopy(trainer.model).eval()
    initial.get_base_model().__dict__.pop("forward")
    trainer.train()
    for name, weight in recorder.before.items():
        assert not torch.equal(recorder.after[-1][name], weight), name
    batch = recorder.batches[-1]
    recorded = batch["ref_per_token_logps"] * batch["completion_mask"]
    torch.testing.assert_close(recorded, batch_logprobs(initial, batch), rtol=0, atol=1e-4)


def lora(**options):
    return LoraConfig(**{**LORA, **options})


def loftq():
    """LoraConfig itself wants scipy for it, and then goes on like this."""
    config = lora()
    config.init_lora_weights = "loftq"
    return config


REFUSED = {
    "`init_lora_weights='pissa_niter_2'`": (lambda: lora(init_lora_weights="pissa_niter_2"), {}),
    "`init_lora_weights='corda'`": (lambda: lora(init_lora_weights="corda"), {}),
    "`init_lora_weights='lora_ga'`": (lambda: lora(init_lora_weights="lora_ga"), {}),
    "`init_lora_weights='eva'`": (lambda: lora(init_lora_weights="eva"), {}),
    "`init_lora_weights='loftq'`": (loftq, {}),
    "`alora_invocation_tokens=[3, 4]`": (lambda: lora(alora_invocation_tokens=[3, 4]), {}),
    "`use_qalora=True`": (lambda: lora(use_qalora=True), {}),
    "`monteclora_config=": (lambda: lora(monteclora_config=MontecloraConfig()), {}),
    "`layer_replication=[(0, 2)]`": (lambda: lora(layer_replication=[(0, 2)]), {}),
    "`megatron_config=": (lambda: lora(megatron_config={"a": 1}), {}),
    "`inference_mode=True`": (lambda: lora(inference_mode=True), {}),
    "`task_type='SEQ_CLS'`": (lambda: lora(task_type="SEQ_CLS"), {}),
    "`bias='all'` changes the reference": (lambda: lora(bias="all"), {}),
    "`bias='all'` changes the shared critic": (lambda: lora(bias="all"), {"kl_coef": 0.0}),
    "`sync_ref_model=True`": (lora, {"sync_ref_model": True}),
    "Applying a PEFT adapter to `lm_head`": (lambda: lora(target_modules=["lm_head"]), {}),
    "AdaLoraConfig": (lambda: AdaLoraConfig(total_step=9, target_modules=["q_proj"]), {}),
    "a PromptTuningConfig": (
        lambda: PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
        {},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_trained(message, tmp_path):
    config, options = REFUSED[message]
    model = tiny_policy(char_tokenizer())
    with pytest.raises(ValueError, match=re.escape(message)):
        scripted_trainer(tmp_path, model=model, peft_config=config(), **{**RUN, **options})
