"""What is written can be loaded by the ordinary classes, and a resumed trainer starts where it was."""

import logging

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen2ForCausalLM,
    TrainerCallback,
)

from tests.kit.builders import build, train
from tests.kit.fakes import char_tokenizer, tiny_config, tiny_policy, tiny_value_model
from tests.kit.scripted import numbered_rows, scripted_trainer
from tests.kit.tiers import quick
from trl_stppo import STPPOTrainer
from trl_stppo.models.critic import EPSILON, HEAD_FILE

LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
OPTIONS = {
    "trainer_class": STPPOTrainer,
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "critic_learning_rate": 2e-2,
    "lr_scheduler_type": "linear",
    "num_ppo_epochs": 2,
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
}
KINDS = ("full", "shared", "shared-pretrained", "peft-value", "default")
IDS = torch.arange(3, 19).unsqueeze(0)


class StateAtStart(TrainerCallback):
    """Everything a checkpoint has to restore, as it is when training begins and after a step."""

    def __init__(self) -> None:
        self.trainer, self.at_start, self.by_step = None, {}, {}

    def on_train_begin(self, args, state, control, **kwargs):
        self.at_start = snapshot(self.trainer)

    def on_step_end(self, args, state, control, **kwargs):
        self.by_step[state.global_step] = snapshot(self.trainer)


def snapshot(trainer) -> dict:
    """Policy, critic and optimizer, as flat names to tensors and numbers."""
    result = {f"policy/{n}": p.detach().clone() for n, p in trainer.model.named_parameters()}
    for i, parameter in enumerate(trainer.critic.parameters()):
        result[f"critic/{i}"] = parameter.detach().clone()
    optimizer = trainer.optimizer
    for g, group in enumerate(optimizer.param_groups):
        result[f"group/{g}"] = (group["lr"], group["weight_decay"], len(group["params"]))
        for i, parameter in enumerate(group["params"]):
            for name, value in optimizer.state[parameter].items():
                result[f"state/{g}/{i}/{name}"] = value.clone()
    return result


def arguments(kind: str, folder) -> dict:
    """One trainer of each kind; the same call makes the same one again."""
    tokenizer = char_tokenizer()
    base = folder / "base"
    if not base.exists():
        tiny_policy(tokenizer).save_pretrained(base)
    result = {"model": AutoModelForCausalLM.from_pretrained(base), "folder": folder / "run"}
    torch.manual_seed(4)
    if kind == "full":
        result["value_model"] = tiny_value_model(tokenizer)
    elif kind == "shared":
        result["peft_config"] = LoraConfig(**LORA)
    elif kind == "shared-pretrained":
        config = LoraConfig(**LORA, init_lora_weights=False)
        result |= {"model": get_peft_model(result["model"], config), "peft_config": None}
    elif kind == "peft-value":
        config = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS")
        result["value_model"] = get_peft_model(tiny_value_model(tokenizer), config)
    else:
        result["value_model"] = None
    return {**OPTIONS, **result}


def run(kind, folder, resume=None, **options):
    watcher = StateAtStart()
    trainer, _ = scripted_trainer(**{**arguments(kind, folder), "callbacks": [watcher], **options})
    watcher.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    return trainer, watcher


@pytest.fixture(scope="module", params=quick(KINDS, "shared", "peft-value", "default"))
def finished(request, tmp_path_factory):
    """Kind, folder, trainer and watcher of a run of four steps with two checkpoints."""
    folder = tmp_path_factory.mktemp(request.param)
    trainer, watcher = run(request.param, folder)
    trainer.save_model()
    return request.param, folder, trainer, watcher


def scaled(hidden):
    """States with a root mean square of 1, as a critic's head reads them."""
    return hidden / (hidden.square().mean(-1, keepdim=True) + EPSILON).sqrt()


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


def test_the_saved_policy_loads_with_the_ordinary_classes(finished):
    kind, folder, trainer, _ = finished
    loader = AutoPeftModelForCausalLM if "shared" in kind else AutoModelForCausalLM
    loaded = loader.from_pretrained(folder / "run")
    assert isinstance(loaded, PeftModel) == ("shared" in kind)
    torch.testing.assert_close(logits(loaded), logits(trainer.model), rtol=0, atol=1e-6)
    untrained = AutoModelForCausalLM.from_pretrained(folder / "base")
    assert (logits(untrained) - logits(loaded)).abs().max() > 1e-3
    trainer.model.train()


def test_the_saved_critic_loads_with_the_ordinary_classes(finished):
    kind, folder, trainer, _ = finished
    path = folder / "run" / "critic"
    if "shared" in kind:
        base = AutoModelForCausalLM.from_pretrained(folder / "base")
        loaded = PeftModel.from_pretrained(base, path)
        head = load_file(path / HEAD_FILE)
        with torch.no_grad():
            hidden = scaled(loaded.get_base_model().model(IDS).last_hidden_state)
            scores = hidden @ head["weight"].T + head["bias"]
    elif kind == "peft-value":
        loaded = PeftModel.from_pretrained(tiny_value_model(char_tokenizer()), path / "value_model")
        hidden = loaded.get_base_model().model(IDS).last_hidden_state
        scores = loaded.get_base_model().score(scaled(hidden))
    else:
        loaded = AutoModelForSequenceClassification.from_pretrained(path)
        scores = loaded.score(scaled(loaded.model(IDS).last_hidden_state))
    with torch.no_grad(), trainer.critic.active():
        values = trainer.critic.values(IDS, torch.ones_like(IDS), IDS.size(1) - 1)
    assert values.abs().max() > 1e-3
    torch.testing.assert_close(scores.squeeze(-1).detach(), values, rtol=0, atol=1e-6)


def test_a_resumed_trainer_starts_with_the_checkpoints_state(finished):
    kind, folder, _, watcher = finished
    _, resumed = run(kind, folder, resume=str(folder / "run" / "checkpoint-2"))
    saved, loaded = watcher.by_step[2], resumed.at_start
    assert loaded.keys() == saved.keys()
    assert sum(name.startswith("group/") for name in saved) >= 2
    assert any(name.startswith("state/") for name in saved)
    for name, value in saved.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(loaded[name], value), name
        else:
            assert loaded[name] == pytest.approx(value), name
    moved = [n for n in saved if not equal(saved[n], watcher.by_step[4][n])]
    assert any(n.startswith("critic/") for n in moved)
    assert any(n.startswith("policy/") for n in moved)
    assert sorted(resumed.by_step) == [3, 4]
    trained = [n for n in moved if n.startswith(("policy/", "critic/"))]
    assert all(not equal(resumed.by_step[4][n], loaded[n]) for n in trained), "all still train"


def equal(one, other) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.long
@pytest.mark.parametrize("kind", ["full", "shared"])
def test_the_best_model_at_the_end_has_the_critic_of_its_checkpoint(kind, tmp_path):
    """The scripted score never improves, so the first checkpoint stays the best one."""
    trainer, watcher = run(
        kind, tmp_path, load_best_model_at_end=True, metric_for_best_model="eval_episode/score",
        greater_is_better=True, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=8,
        eval_dataset=numbered_rows(),
    )  # fmt: skip
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    final = snapshot(trainer)
    for name, value in watcher.by_step[2].items():
        if name.startswith(("policy/", "critic/")):
            assert torch.equal(final[name], value), name


def test_tied_weights_are_not_called_missing(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)

    def arguments():
        torch.manual_seed(0)
        return {"model": Qwen2ForCausalLM(tiny_config(char_tokenizer(), tie_word_embeddings=True))}

    train(tmp_path, arguments=arguments(), save_strategy="steps", save_steps=2)
    trainer = build(tmp_path, arguments=arguments(), max_steps=4)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.model.lm_head.weight is trainer.model.model.embed_tokens.weight
    assert "missing keys" not in caplog.text
    file = tmp_path / "checkpoint-2" / "model.safetensors"
    lost = load_file(file)
    del lost["model.norm.weight"]
    save_file(lost, file, metadata={"format": "pt"})
    trainer._load_from_checkpoint(str(file.parent))
    assert "missing keys" in caplog.text
