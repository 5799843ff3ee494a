"""A critic that is a model of its own, in every way to ask for one; and the warm-up of any critic."""

import copy
from itertools import product

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from tests.kit.fakes import char_tokenizer, tiny_policy, tiny_value_model
from tests.kit.scripted import (
    LEARNS,
    logged,
    norm,
    play_script,
    policy_parameters,
    scripted_trainer,
    train,
)
from tests.kit.tiers import quick
from trl_stppo.models.critic import EPSILON, SeparateCritic
from trl_stppo.models.critic_models import critic_from_checkpoint
from trl_stppo.trainer.batch import full_sequence
from trl_stppo.trainer.loop import forward

LORA = {"r": 4, "target_modules": "all-linear"}


def policy(seed: int = 0):
    return tiny_policy(char_tokenizer(), seed)


def value_model(seed: int = 1):
    return tiny_value_model(char_tokenizer(), seed)


def state(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def changed(model, before):
    return {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}


def test_a_given_value_model_is_trained_in_place(tmp_path):
    given = value_model()
    before = state(given)
    reference = copy.deepcopy(given).eval()
    trainer, recorder = train(tmp_path, model=policy(), value_model=given, **LEARNS)
    assert isinstance(trainer.critic, SeparateCritic)
    assert not trainer.uses_shared_critic
    assert trainer.critic.model is given
    assert changed(given, before) == set(before)
    # Before the first step its values are its own, read before each token.
    ids, mask, length = full_sequence(recorder.batches[0])
    with torch.no_grad():
        hidden = reference.model(input_ids=ids, attention_mask=mask).last_hidden_state
        hidden = hidden / (hidden.square().mean(-1, keepdim=True) + EPSILON).sqrt()
        values = reference.score(hidden).squeeze(-1)[:, -length - 1 : -1]
    counted = recorder.batches[0]["completion_mask"].bool()
    torch.testing.assert_close(recorder.batches[0]["values"][counted], values[counted])


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", quick([False, True], True))
def test_a_peft_value_model_trains_its_adapter_and_head_only(checkpointing, tmp_path):
    config = LoraConfig(**LORA, task_type="SEQ_CLS", init_lora_weights=False)
    given = get_peft_model(value_model(), config)
    before = state(given)
    trainable = {name for name, p in given.named_parameters() if p.requires_grad}
    trainer, recorder = train(
        tmp_path, model=policy(), value_model=given, gradient_checkpointing=checkpointing, **LEARNS
    )
    assert changed(given, before) == trainable
    assert any("modules_to_save" in name for name in trainable)
    assert any("lora_A" in name for name in trainable)
    assert len(trainer.critic.parameters()) == len(trainable)
    assert norm(recorder.moved("critic")) > 0


def test_gradient_checkpointing_changes_no_gradient_of_a_separate_critic(tmp_path, monkeypatch):
    monkeypatch.setitem(forward.PASS_OVERHEAD, "cpu", float("inf"))
    runs, calls = [], []
    for checkpointing in (False, True):
        count, critic = [], value_model().eval()
        attention = critic.model.layers[0].self_attn
        attention.register_forward_hook(lambda *_, count=count: count.append(1))
        _, recorder = train(
            tmp_path / str(checkpointing), model=policy(), value_model=critic,
            gradient_checkpointing=checkpointing, **{**LEARNS, "optim": "sgd", "max_steps": 2},
        )  # fmt: skip
        runs.append(recorder)
        calls.append(len(count))
    assert calls[1] == calls[0] + 2, "one recomputation per step"
    for one, other in zip(runs[0].after, runs[1].after, strict=True):
        for name, weight in one.items():
            torch.testing.assert_close(other[name], weight, rtol=0, atol=1e-7)


def test_by_default_the_critic_is_a_copy_of_the_policy_with_a_zero_head(tmp_path):
    initial = policy()
    trainer, _ = scripted_trainer(tmp_path, model=policy(), value_model=None, **LEARNS)
    critic = trainer.critic.model
    assert torch.count_nonzero(critic.score.weight) == 0
    for name, weight in initial.model.named_parameters():
        assert torch.equal(critic.model.get_parameter(name), weight), name
    before = state(trainer.model), state(critic)
    trainer.train()
    assert changed(trainer.model, before[0]) == set(before[0])
    assert changed(critic, before[1]) == set(before[1])
    shared = {p.data_ptr() for p in trainer.model.parameters()}
    assert shared.isdisjoint(p.data_ptr() for p in critic.parameters())


class StateWatcher(TrainerCallback):
    """How many of the policy's parameters have optimizer state after each step."""

    def __init__(self) -> None:
        self.trainer, self.counts = None, []

    def on_optimizer_step(self, *args, optimizer, **kwargs):
        held = optimizer.optimizer.state if hasattr(optimizer, "optimizer") else optimizer.state
        parameters = policy_parameters(self.trainer).values()
        self.counts.append(sum(p in held for p in parameters))


@pytest.mark.long
@pytest.mark.parametrize(
    ("max_grad_norm", "critic"),
    quick(product([0.0, 1.0], ["shared", "separate"]), (0.0, "separate"), (1.0, "shared")),
)
def test_warm_up_leaves_the_policy_bit_identical(critic, max_grad_norm, tmp_path):
    watcher = StateWatcher()
    kind = (
        {"peft_config": LoraConfig(**LORA, init_lora_weights=False)}
        if critic == "shared"
        else {"value_model": value_model()}
    )
    trainer, recorder = scripted_trainer(
        tmp_path, model=policy(), callbacks=[watcher], critic_warmup_steps=2, weight_decay=0.5,
        max_grad_norm=max_grad_norm, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        entropy_coef=0.01, **kind, **LEARNS,
    )  # fmt: skip
    watcher.trainer = trainer
    base = state(trainer.model)
    trainer.train()
    for step in (0, 1):
        assert norm(recorder.moved("critic", step)) > 0
        assert all(torch.count_nonzero(m) == 0 for m in recorder.moved("policy", step).values())
        assert recorder.grads[step] == {}
    for step in (2, 3):
        assert all(torch.count_nonzero(m) > 0 for m in recorder.moved("policy", step).values())
        assert norm(recorder.moved("critic", step)) > 0
    number = len(policy_parameters(trainer))
    assert watcher.counts == [0, 0, number, number]
    assert len(logged(trainer, "clip_bias/norm")) == 2
    moving = {n for n in base if "lora" in n and ".ref." not in n}
    assert changed(trainer.model, base) == (set(base) if critic == "separate" else moving)


def test_warm_up_regresses_on_monte_carlo_returns(tmp_path):
    """Reward to go, whatever lam; afterwards lam counts, and with it the critic."""
    trainer, recorder = train(
        tmp_path, model=policy(), value_model=value_model(), staleness=0.0, critic_warmup_steps=2,
        lam=0.3, kl_coef=0.0, **LEARNS,
    )  # fmt: skip
    assert trainer.args.lam == 0.3
    number = {tuple(play_script([str(n)])["prompt_ids"][0]): n for n in range(8)}
    largest_gap = []
    for batch in (recorder.batches[0], recorder.batches[2]):
        gap = 0.0
        for row, prompt in enumerate(batch["prompt_ids"]):
            ids = tuple(prompt[batch["prompt_mask"][row].bool()].tolist())
            rewards = play_script([str(number[ids])])["turn_rewards"][0]
            for t, turn in enumerate(batch["turn_index"][row].tolist()):
                if turn >= 0:
                    gap = max(gap, abs(batch["returns"][row, t].item() - sum(rewards[turn:])))
        largest_gap.append(gap)
    assert largest_gap[0] < 1e-5
    assert largest_gap[1] > 1e-2


def test_a_named_critic_has_the_dtype_of_its_file_if_asked(tmp_path):
    policy().to(torch.bfloat16).save_pretrained(tmp_path)
    assert critic_from_checkpoint(str(tmp_path), dtype="auto").dtype == torch.bfloat16
