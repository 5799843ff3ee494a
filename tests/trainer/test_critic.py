"""The shared critic: a second LoRA adapter and a head on the policy's own frozen backbone."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import TrainerCallback

from tests.fakes import char_tokenizer, tiny_policy
from tests.scripted import LEARNS, STEPS, assert_same, plain_logprobs, scripted_trainer, train
from tests.tiers import quick
from trl_stppo.models.critic import SharedCritic

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
SHARED = {**LEARNS, "beta": 0.1}


def shared(folder, **options):
    """Arguments of a trainer with a fresh LoRA policy and a shared critic, and the base's copy."""
    base = tiny_policy(char_tokenizer())
    arguments = {"model": base, "peft_config": LoraConfig(**LORA), "folder": folder}
    return {**SHARED, **arguments, **options}, copy.deepcopy(base).eval()


def trained_adapter(seed: int = 3) -> PeftModel:
    """A policy that comes with an adapter which already does something."""
    torch.manual_seed(seed)
    config = LoraConfig(**LORA, init_lora_weights=False)
    return get_peft_model(tiny_policy(char_tokenizer()), config)


def sequences(batch):
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return ids, mask, batch["completion_ids"].size(1)


@torch.no_grad()
def logprobs(model, batch):
    values, _ = plain_logprobs(model, *sequences(batch))
    return values * batch["completion_mask"]


def states(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


# --------------------------------------------------------------------- what is trained


@pytest.mark.parametrize("checkpointing", quick([False, True], True))
def test_policy_adapter_critic_adapter_and_head_all_train_and_the_base_does_not(
    checkpointing, tmp_path
):
    arguments, base = shared(tmp_path, gradient_checkpointing=checkpointing)
    trainer, recorder = scripted_trainer(**arguments)
    assert trainer.uses_shared_critic
    before = states(trainer)
    trainer.train()
    for name, weight in states(trainer).items():
        changed = not torch.equal(weight, before[name])
        assert changed == ("lora_" in name), name
    for part in ("policy", "critic"):
        for name, weight in recorder.before.items():
            if name.startswith(part):
                assert not torch.equal(recorder.after[-1][name], weight), name
    assert sum(".critic." in name for name in before) == sum(".default." in name for name in before)
    ids = torch.arange(3, 19).unsqueeze(0)
    with torch.no_grad(), trainer.model.disable_adapter():
        assert torch.equal(trainer.model(ids).logits, base(ids).logits)


def test_reference_logprobs_are_those_of_the_untouched_base(tmp_path):
    arguments, base = shared(tmp_path, staleness=0.0)
    _, recorder = train(**arguments)
    for step in (0, STEPS - 1):
        batch = recorder.batches[step]
        recorded = batch["ref_per_token_logps"] * batch["completion_mask"]
        torch.testing.assert_close(recorded, logprobs(base, batch), rtol=0, atol=1e-5)
    late = recorder.batches[-1]
    gap = (late["old_per_token_logps"] - late["ref_per_token_logps"]).abs().max()
    assert gap > 1e-2, "the policy should have moved away by then"


class GradFlags(TrainerCallback):
    """Which parameters require a gradient when the optimizer is about to step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, bool]] = []

    def on_pre_optimizer_step(self, *args, model, **kwargs):
        self.seen.append({n: p.requires_grad for n, p in model.named_parameters()})


@pytest.mark.parametrize("comes_trained", quick([False, True], True))
def test_requires_grad_survives_reference_passes(comes_trained, tmp_path):
    flags = GradFlags()
    arguments, _ = shared(tmp_path, callbacks=[flags])
    if comes_trained:  # then the reference is an adapter too, and reference passes switch to it
        arguments |= {"model": trained_adapter(), "peft_config": None}
    train(**arguments)
    assert len(flags.seen) == STEPS
    for seen in flags.seen:
        for name, requires_grad in seen.items():
            assert requires_grad == (".default." in name or ".critic." in name), name


@pytest.mark.parametrize("variant", quick(["ppo", "st-ppo"], "st-ppo"))
def test_gradient_checkpointing_changes_no_gradient_of_either_adapter(variant, tmp_path):
    """A layer recomputed in the critic's backward must run with the critic's adapter again."""
    runs, calls = [], []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        arguments, _ = shared(
            tmp_path / str(checkpointing),
            gradient_checkpointing=checkpointing,
            variant=variant,
            optim="sgd",
            learning_rate=0.5,
            critic_learning_rate=0.5,
            max_grad_norm=0.0,
            vf_coef=1.0,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
        )
        trainer, recorder = scripted_trainer(**arguments)
        count = []
        layer = trainer.model.get_base_model().model.layers[0]
        layer.self_attn.register_forward_hook(lambda *_, count=count: count.append(1))
        trainer.train()
        runs.append(recorder)
        calls.append(len(count))
    assert calls[1] > calls[0], "nothing was recomputed"
    for step in range(STEPS):
        assert_same(runs[1].grads[step], runs[0].grads[step], 1e-6)
        for part in ("policy", "critic"):
            moved = runs[0].moved(part, step)
            assert_same(runs[1].moved(part, step), moved, 1e-6)
    adapters = [v for n, v in runs[0].moved("critic", STEPS - 1).items() if v.dim() == 2]
    assert all(v.abs().max() > 0 for v in adapters), "the critic's adapter should have moved"


# -------------------------------------------------------------------- nothing leaks


def test_values_ignore_the_policy_adapter_and_logprobs_the_critics(tmp_path):
    arguments, _ = shared(tmp_path)
    trainer, recorder = train(**arguments)
    batch = recorder.batches[-1]

    @torch.no_grad()
    def outputs():
        with trainer.critic.active():
            values = trainer.critic.values(*sequences(batch))
        return values, logprobs(trainer.model, batch)

    @torch.no_grad()
    def shake(adapter):
        for name, parameter in trainer.model.named_parameters():
            if f".{adapter}." in name:
                parameter += torch.randn_like(parameter)

    values, policy = outputs()
    assert values.std() > 0
    shake("default")
    other_values, other_policy = outputs()
    assert torch.equal(other_values, values)
    assert not torch.allclose(other_policy, policy)
    shake("critic")
    last_values, last_policy = outputs()
    assert not torch.allclose(last_values, values)
    assert torch.equal(last_policy, other_policy)


def test_the_policy_adapter_stays_active_after_the_critics_turn(tmp_path):
    arguments, _ = shared(tmp_path)
    trainer, _ = scripted_trainer(**arguments)
    with pytest.raises(RuntimeError, match="interrupted"), trainer.critic.active():
        raise RuntimeError("interrupted")
    assert trainer.model.active_adapters == ["default"]
    assert isinstance(trainer.critic, SharedCritic)


def test_pushed_weights_are_the_merged_policy_under_the_bases_names(tmp_path):
    """What TRL would send to vLLM: no name of the critic, nothing of its adapter merged."""
    generation = pytest.importorskip("trl.generation.vllm_generation").VLLMGeneration
    arguments, base = shared(tmp_path)
    trainer, _ = train(**arguments)
    sender = SimpleNamespace(
        model=trainer.model,
        _dist=SimpleNamespace(gather_params=lambda parameters: nullcontext(), is_fsdp=False),
        _fix_param_name_to_vllm=lambda name, extra_prefixes=None: name,
    )
    with torch.no_grad():
        named = generation._iter_named_params(sender)
        pushed = {name: weight.clone() for name, weight in named}
    assert pushed.keys() == dict(base.named_parameters()).keys()
    adapter = trainer.model.state_dict()
    for name, weight in base.named_parameters():
        prefix = "base_model.model." + name.removesuffix(".weight")
        a, b = (adapter.get(f"{prefix}.lora_{x}.default.weight") for x in "AB")
        scaling = LORA["lora_alpha"] / LORA["r"]
        expected = weight if a is None else weight + scaling * b @ a
        torch.testing.assert_close(pushed[name], expected, rtol=0, atol=1e-6)
    assert any(not torch.equal(pushed[n], w) for n, w in base.named_parameters())


# ---------------------------------------------------------------------- variants of it


def test_rank_of_the_critic_adapter_can_be_set(tmp_path):
    arguments, _ = shared(tmp_path, critic_lora_r=2)
    trainer, recorder = train(**arguments)
    shapes = {n: p.shape for n, p in trainer.model.named_parameters() if "lora_A" in n}
    assert {s[0] for n, s in shapes.items() if ".critic." in n} == {2}
    assert {s[0] for n, s in shapes.items() if ".default." in n} == {4}
    config = trainer.model.peft_config
    assert config["critic"].lora_alpha / 2 == config["default"].lora_alpha / 4
    assert all(v.abs().max() > 0 for v in recorder.moved("critic", STEPS - 1).values())


def test_the_critic_starts_at_zero(tmp_path):
    arguments, _ = shared(tmp_path)
    _, recorder = train(**arguments)
    assert torch.count_nonzero(recorder.batches[0]["values"]) == 0
    assert torch.count_nonzero(recorder.batches[-1]["values"]) > 0


def test_a_policy_that_comes_trained_is_its_own_reference(tmp_path):
    """The reference is a frozen copy of the adapter as it came, not the base without adapters."""
    policy = trained_adapter()
    initial = copy.deepcopy(policy).eval()
    arguments, base = shared(tmp_path, model=policy, peft_config=None)
    trainer, recorder = train(**arguments)
    for step in (0, STEPS - 1):
        batch = recorder.batches[step]
        recorded = batch["ref_per_token_logps"] * batch["completion_mask"]
        torch.testing.assert_close(recorded, logprobs(initial, batch), rtol=0, atol=1e-5)
        assert not torch.allclose(recorded, logprobs(base, batch), atol=1e-2)
    for name, weight in initial.named_parameters():
        if ".default." in name:
            assert torch.equal(trainer.model.get_parameter(name.replace("default", "ref")), weight)
            assert not torch.equal(trainer.model.get_parameter(name), weight)
