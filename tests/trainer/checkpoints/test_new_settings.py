"""A setting that is changed on resume holds from there on, as if somebody had changed it by hand."""

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from tests.kit.fakes import char_tokenizer, tiny_policy, tiny_value_model
from tests.kit.scripted import numbered_rows, policy_parameters, scripted_trainer, weights
from tests.kit.tiers import quick
from trl_stppo import STPPOTrainer

AT, STEPS = 2, 5
RUN = {
    "trainer_class": STPPOTrainer, "optim": "adamw_torch", "learning_rate": 1e-2,
    "critic_learning_rate": 2e-2, "weight_decay": 0.0, "lr_scheduler_type": "cosine",
    "warmup_steps": 1, "max_grad_norm": 0.5, "num_ppo_epochs": 2, "max_steps": STEPS,
    "save_strategy": "steps", "save_steps": AT, "trace_episodes": 0,
}  # fmt: skip
CHANGES = {
    "rates": {"learning_rate": 1e-3, "critic_learning_rate": 7e-2},
    "the critic's rate": {"critic_learning_rate": 1e-3},
    "Adam": {"weight_decay": 0.4, "adam_beta1": 0.5, "adam_beta2": 0.9, "adam_epsilon": 1e-3},
}
POLICY, BARE, CRITIC, BARE_CRITIC = range(4)


def build(folder, *callbacks, **options) -> STPPOTrainer:
    tokenizer = char_tokenizer()
    models = {"model": tiny_policy(tokenizer), "value_model": tiny_value_model(tokenizer)}
    torch.manual_seed(3)
    settings = {**RUN, **models, **options}
    return scripted_trainer(folder, **settings, callbacks=list(callbacks))[0]


class ByHand(TrainerCallback):
    """Sets values after a step where torch keeps them."""

    def __init__(self, changes: dict) -> None:
        self._changes = changes

    def on_step_end(self, args, state, control, optimizer=None, lr_scheduler=None, **kwargs):
        if state.global_step != AT:
            return
        for name, new in self._changes.items():
            for number, group in enumerate(optimizer.param_groups):
                first, second = group["betas"]
                rate = "critic_learning_rate" if number >= CRITIC else "learning_rate"
                if name == rate:
                    group["lr"] *= new / lr_scheduler.base_lrs[number]
                    lr_scheduler.base_lrs[number] = new
                    lr_scheduler._last_lr[number] = group["lr"]
                elif name == "weight_decay" and number in (POLICY, CRITIC):
                    group["weight_decay"] = new
                elif name.startswith("adam"):
                    betas = {"adam_beta1": (new, second), "adam_beta2": (first, new)}
                    group["betas"] = betas.get(name, group["betas"])
                    group["eps"] = new if name == "adam_epsilon" else group["eps"]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Checkpoint of step `AT`, and the weights that the run has come to without a change."""
    folder = tmp_path_factory.mktemp("run")
    trainer = build(folder)
    trainer.train()
    return str(folder / f"checkpoint-{AT}"), weights(trainer)


def far(one, other) -> float:
    return max((one[name] - weight).abs().max().item() for name, weight in other.items())


@pytest.mark.long
@pytest.mark.parametrize("case", quick(CHANGES, "rates", "Adam"))
def test_it_holds_from_the_checkpoint_on_and_is_said(case, stopped, tmp_path, caplog):
    checkpoint, unchanged = stopped
    changes = CHANGES[case]
    expected = build(tmp_path / "by hand", ByHand(changes), save_strategy="no")
    expected.train()
    trainer = build(tmp_path / "resumed", save_strategy="no", **changes)
    trainer.train(resume_from_checkpoint=checkpoint)
    assert far(weights(trainer), weights(expected)) < 1e-7
    assert far(weights(trainer), unchanged) > 1e-3
    first, *others = sorted(changes)
    assert f"goes on with new settings: {first}: {RUN.get(first, 0.9)!r} -> " in caplog.text
    assert all(f"; {name}: " in caplog.text for name in others)
    mine, theirs = (
        [e["learning_rate"] for e in t.state.log_history if "learning_rate" in e] for t in (trainer, expected)
    )
    assert mine == pytest.approx(theirs[-len(mine) :])


@pytest.mark.long
def test_an_optimizer_that_was_passed_in_keeps_its_groups(tmp_path):
    """The critic's groups, which it did not have, are ours."""

    def with_own(**options):
        trainer = build(tmp_path, train_dataset=numbered_rows(), **options)
        named = list(policy_parameters(trainer).values())
        trainer.optimizer = torch.optim.AdamW(named, lr=5e-3, weight_decay=0.2)
        return trainer

    with_own(max_steps=AT).train()
    changes = {**CHANGES["rates"], "weight_decay": 0.4, "adam_beta1": 0.5}
    trainer = with_own(max_steps=AT + 1, lr_scheduler_type="constant", **changes)
    trainer.train(resume_from_checkpoint=True)
    policy, critic, bare = trainer.optimizer.param_groups
    assert (policy["initial_lr"], policy["weight_decay"], policy["betas"]) == (
        5e-3,
        0.2,
        (0.9, 0.999),
    )
    assert (critic["lr"], critic["weight_decay"], critic["betas"]) == (7e-2, 0.4, (0.9, 0.999))
    assert (bare["lr"], bare["weight_decay"], bare["betas"]) == (7e-2, 0.0, (0.9, 0.999))


@pytest.mark.parametrize("shared", [True, False])
def test_norms_and_biases_of_the_critic_do_not_decay(shared, tmp_path):
    options = {"weight_decay": 0.3}
    if shared:
        model = tiny_policy(char_tokenizer())
        config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        options |= {"model": model, "value_model": None, "peft_config": config}
    trainer = build(tmp_path, **options)
    trainer.create_optimizer()
    critic = trainer.critic
    named = {id(p): n for m in (critic.model, critic.head) for n, p in m.named_parameters()}
    decayed, bare = ([named[id(p)] for p in g["params"]] for g in trainer.optimizer.param_groups[CRITIC:])
    assert trainer.optimizer.param_groups[BARE_CRITIC]["weight_decay"] == 0.0
    assert len(decayed) + len(bare) == len(critic.parameters())
    assert all("norm" in name or "bias" in name for name in bare)
    assert not any("norm" in name or "bias" in name for name in decayed)
    assert bare
