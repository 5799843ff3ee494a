"""The shared critic: a second LoRA adapter and a head on the policy's own frozen backbone."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig

from tests.kit.fakes import char_tokenizer, tiny_policy
from tests.kit.scripted import LEARNS, STEPS, assert_same, batch_logprobs, scripted_trainer, train
from tests.kit.tiers import quick
from trl_stppo.models.critic import SharedCritic
from trl_stppo.trainer.batch import full_sequence

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
SHARED = {**LEARNS, "beta": 0.1}


def shared(folder, **options):
    """Arguments of a trainer with a fresh LoRA policy and a shared critic, and the base's copy."""
    base = tiny_policy(char_tokenizer())
    arguments = {"model": base, "peft_config": LoraConfig(**LORA), "folder": folder}
    return {**SHARED, **arguments, **options}, copy.deepcopy(base).eval()


def states(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", quick([False, True], True))
def test_policy_adapter_critic_adapter_and_head_all_train_and_the_base_does_not(checkpointing, tmp_path):
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


@pytest.mark.long
@pytest.mark.parametrize("variant", quick(["ppo", "st-ppo"], "st-ppo"))
def test_gradient_checkpointing_changes_no_gradient_of_either_adapter(variant, tmp_path):
    """A layer recomputed in the critic's backward must run with the critic's adapter again."""
    runs, calls = [], []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        arguments, _ = shared(
            tmp_path / str(checkpointing), gradient_checkpointing=checkpointing, variant=variant,
            optim="sgd", learning_rate=0.5, critic_learning_rate=0.5, max_grad_norm=0.0,
            vf_coef=1.0, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        )  # fmt: skip
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


@pytest.mark.long
def test_values_ignore_the_policy_adapter_and_logprobs_the_critics(tmp_path):
    arguments, _ = shared(tmp_path)
    trainer, recorder = train(**arguments)
    batch = recorder.batches[-1]

    @torch.no_grad()
    def outputs():
        with trainer.critic.active():
            values = trainer.critic.values(*full_sequence(batch))
        return values, batch_logprobs(trainer.model, batch)

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
