"""`optim=`: each optimizer that runs here is stepped and resumed; those for a GPU get their hooks."""

import pytest
import torch
from peft import LoraConfig
from transformers import Adafactor, AutoModelForCausalLM

from tests.kit import builders
from tests.kit.fakes import char_tokenizer, tiny_config, tiny_policy
from tests.kit.scripted import logged, norm, policy_parameters, scripted_trainer
from tests.kit.tiers import quick
from trl_stppo import STPPOTrainer
from trl_stppo.trainer.optimizers import check_optimizer

STEPS = 2
RUN = {
    "trainer_class": STPPOTrainer, "learning_rate": 1e-2, "critic_learning_rate": 2e-2,
    "lr_scheduler_type": "linear", "num_ppo_epochs": 1, "max_steps": STEPS,
    "save_strategy": "steps", "save_steps": 1, "variant": "st-ppo", "gradient_checkpointing": False,
}  # fmt: skip
TORCH = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd")
# bitsandbytes steps tensors under 4096 elements with 32-bit state, for which it has CPU kernels.
BITSANDBYTES = {
    "adamw_bnb_8bit": "AdamW", "paged_adamw_8bit": "AdamW", "paged_adamw_32bit": "AdamW",
    "lion_8bit": "Lion", "ademamix_8bit": "AdEMAMix",
}  # fmt: skip


def build(folder, optim, rank=4, **options):
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    if not (folder / "base").exists():
        config = tiny_config(char_tokenizer())
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    return scripted_trainer(
        folder / "run",
        model=AutoModelForCausalLM.from_pretrained(folder / "base"),
        peft_config=LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        **{**RUN, "optim": optim, **options},
    )


def bare(optimizer):
    """The optimizer without accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


NOW = ("adafactor", "paged_adamw_8bit")


@pytest.mark.long
@pytest.mark.parametrize("optim", quick([*TORCH, *BITSANDBYTES], *NOW))
def test_policy_and_critic_step_and_a_resumed_run_equals_the_uninterrupted(optim, tmp_path):
    if optim in BITSANDBYTES:
        pytest.importorskip("bitsandbytes")
    rates = {"learning_rate": 1.0, "critic_learning_rate": 30.0} if optim == "sgd" else {}
    trainer, recorder = build(tmp_path, optim, **rates)
    trainer.train()
    if optim in BITSANDBYTES:
        assert type(bare(trainer.optimizer)).__name__ == BITSANDBYTES[optim]
    last = recorder.after[-1]
    assert all(torch.isfinite(weight).all() for weight in last.values())
    assert norm(recorder.moved("policy", 1)) > 0
    assert norm(recorder.moved("critic", 1)) > 0
    assert all(0 < scale < 1 for scale in logged(trainer, "clip_bias/scale")), "a scale acted"
    resumed, again = build(tmp_path, optim, **rates)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    for name, weight in last.items():
        assert torch.equal(again.after[-1][name], weight), name


def test_8_bit_state_is_refused_on_the_cpu_before_the_first_step(tmp_path):
    pytest.importorskip("bitsandbytes")
    trainer, recorder = build(tmp_path, "paged_adamw_8bit", rank=256)
    with pytest.raises(ValueError, match=r"`optim` makes AdamW with 8-bit .* On the CPU"):
        trainer.train()
    assert not recorder.after
    trainer.args.optim = "adamw_torch"
    trainer.train()
    assert recorder.after


class Seen:
    """Stands in for a GPU kernel: notes what each step would have used, and moves nothing."""

    def __init__(self):
        self.steps = []

    def __call__(self, group, parameter):
        if not self.steps or parameter in self.steps[-1]:
            self.steps.append({})
        self.steps[-1][parameter] = (group["lr"], parameter.grad.clone())


@pytest.mark.parametrize("optim", ["adamw_8bit", "lion_8bit"])
def test_the_hooks_reach_an_optimizer_with_8_bit_state(optim, tmp_path, monkeypatch):
    """Its kernel runs on a GPU alone; everything up to it is the real thing."""
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.optim.optimizer import Optimizer1State, Optimizer2State

    trainer, _ = build(tmp_path, optim, save_strategy="no")
    seen = Seen()
    for kind in (Optimizer1State, Optimizer2State):
        monkeypatch.setattr(kind, "update_step", lambda self, group, p, gindex, pindex: seen(group, p))
    trainer.train()
    critic = set(trainer.critic.parameters())
    policy = set(policy_parameters(trainer).values())
    # The schedule is linear over two steps.
    rates = [1e-2, 0.5e-2]
    for step, scale, rate in zip(seen.steps, logged(trainer, "clip_bias/scale"), rates, strict=True):
        assert set(step) == policy | critic
        assert 0 < scale < 1
        for parameter, (lr, grad) in step.items():
            assert torch.isfinite(grad).all()
            expected = 2 * rate if parameter in critic else rate * scale
            assert lr == pytest.approx(expected, rel=1e-6)
    head = trainer.critic.head.weight
    assert all(step[head][1].abs().max() > 0 for step in seen.steps)
    assert head.grad is None, "the critic's gradient is taken away after the step"


def test_an_optimizer_that_sets_its_own_rate_is_refused(tmp_path):
    model = tiny_policy(char_tokenizer())
    optimizer = Adafactor(model.parameters(), lr=None, relative_step=True)
    with pytest.raises(ValueError, match=r"a Adafactor that sets its own learning rate"):
        check_optimizer(optimizer)


def test_a_refused_optimizer_is_refused_in_a_second_training_too(tmp_path):
    model = tiny_policy(char_tokenizer())
    groups = [{"params": [p], "lr": 1e-3} for p in model.parameters()]
    optimizer = torch.optim.ASGD(groups)
    trainer = builders.build(
        tmp_path, STPPOTrainer, arguments={"model": model, "optimizers": (optimizer, None)}
    )
    for _ in range(2):
        with pytest.raises(ValueError, match="ASGD"):
            trainer.train()
    assert not optimizer._optimizer_step_pre_hooks
    assert len(optimizer.param_groups) == len(groups)
