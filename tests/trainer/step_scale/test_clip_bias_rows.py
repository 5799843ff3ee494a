"""The second gradient runs through the episodes with clipped tokens only, and is still exact."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from torch import nn

from tests.kit.fakes import char_tokenizer, tiny_policy
from tests.kit.loss_reference import LossReference
from tests.kit.scripted import (
    EPISODES,
    Float64Trainer,
    assert_same,
    logged,
    norm,
    train,
)
from tests.kit.tiers import quick
from trl_stppo import STPPOTrainer
from trl_stppo.trainer.step_scale import ClipBiasCorrection, has_dropout
from trl_stppo.trainer.training_loop import TrainingLoop

FIGURES = ("norm", "grad_norm", "scale", "cosine")
FEW, MOST = {2, 5}, set(range(EPISODES))


class CountingLoop(TrainingLoop):
    """Notes which episodes went through the policy after each micro-batch's own pass."""

    def after_backward(self) -> None:
        before = self.second_pass
        if before is not None:
            passed = self.host.__dict__.setdefault("passed", [])
            passed.append(len(before[0]["completion_ids"]))
        super().after_backward()


class Counting(Float64Trainer):
    loop_class = CountingLoop


def figures(trainer) -> dict[str, list[float]]:
    return {name: logged(trainer, f"clip_bias/{name}") for name in FIGURES}


@pytest.mark.parametrize(
    ("episodes", "variant", "loss_type"),
    quick(
        product([FEW, MOST], ["s-ppo", "st-ppo"], ["grpo", "dapo"]),
        *[(FEW, "s-ppo", "grpo"), (FEW, "st-ppo", "dapo")],
        *[(MOST, "st-ppo", "grpo"), (MOST, "s-ppo", "dapo")],
    ),
)
def test_bias_equals_an_independent_computation(episodes, variant, loss_type, tmp_path):
    trainer, recorder = train(
        tmp_path, trainer_class=Counting, variant=variant, loss_type=loss_type,
        max_completion_length=64, stale_episodes=episodes,
        staleness=1.5 if episodes is FEW else 3.0,
    )  # fmt: skip
    level = "turn" if variant == "st-ppo" else "token"
    reference = LossReference(recorder.batches[0], level, loss_type)
    assert norm(reference.bias) > 0.01 * norm(reference.g), "the case should be interesting"
    assert figures(trainer)["norm"] == pytest.approx([norm(reference.bias)], rel=1e-9)
    assert figures(trainer)["grad_norm"] == pytest.approx([norm(reference.g)], rel=1e-9)
    assert_same(recorder.grads[0], {name: -grad for name, grad in reference.g.items()})
    # A few episodes have a pass of their own; with many the first pass serves.
    passed = getattr(trainer, "passed", [])
    assert (0 < passed[0] <= len(FEW) and len(passed) == 1) if episodes is FEW else not passed


TERMS = {"beta": 0.3, "entropy_coef": 0.2}


@pytest.mark.parametrize("options", quick([{}, TERMS, {"delta": 1.5}], TERMS))
def test_the_split_into_micro_batches_changes_nothing(options, tmp_path):
    runs = []
    for size in (8, 4, 2, 1):
        trainer, recorder = train(
            tmp_path / str(size), trainer_class=Counting, variant="st-ppo", stale_episodes=FEW,
            staleness=0.9, num_ppo_epochs=2, max_steps=2, learning_rate=0.3,
            per_device_train_batch_size=size, gradient_accumulation_steps=EPISODES // size,
            **options,
        )  # fmt: skip
        runs.append((figures(trainer), recorder, trainer))
    expected, recorder, _ = runs[0]
    assert min(expected["norm"]) > 0
    for other, other_recorder, _ in runs[1:]:
        for name in FIGURES:
            assert other[name] == pytest.approx(expected[name], rel=1e-8, abs=1e-12), name
        for step in range(2):
            assert_same(other_recorder.moved("policy", step), recorder.moved("policy", step), 1e-8)
    # Alone in its micro-batch, an episode is no small part of it.
    assert not getattr(runs[-1][2], "passed", [])


def test_no_pass_is_made_where_nothing_is_clipped(tmp_path):
    trainer, _ = train(tmp_path, trainer_class=Counting, staleness=0.0)
    assert figures(trainer)["norm"] == [0.0]
    assert not hasattr(trainer, "passed")


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", quick([False, True], True))
def test_lora_and_the_fused_head_give_the_bias_of_the_first_pass(
    checkpointing, tmp_path, monkeypatch
):
    """Both ways on the same episodes: a pass of their own, and a second backward pass."""
    runs = []
    for few in (0.5, 0.0):
        monkeypatch.setattr("trl_stppo.trainer.step_scale.FEW", few)
        trainer, recorder = train(
            tmp_path / str(few), trainer_class=STPPOTrainer, model=tiny_policy(char_tokenizer()),
            peft_config=LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
            variant="st-ppo", stale_episodes=FEW, staleness=0.9,
            gradient_checkpointing=checkpointing,
        )  # fmt: skip
        runs.append((figures(trainer), recorder.moved("policy"), recorder.moved("critic")))
    one, other = runs
    assert one[0]["norm"][0] > 0
    for name in FIGURES:
        assert one[0][name] == pytest.approx(other[0][name], rel=1e-4, abs=1e-6), name
    assert_same(one[1], other[1], 1e-4)
    assert_same(one[2], other[2], 1e-5)


@pytest.mark.parametrize("disable", [False, True])
def test_with_dropout_the_first_pass_serves(disable, tmp_path):
    """A second pass would draw anew, and measure the bias of another loss."""
    lora = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.3)
    trainer, _ = train(
        tmp_path, trainer_class=STPPOTrainer, model=tiny_policy(char_tokenizer()), peft_config=lora,
        variant="st-ppo", disable_dropout=disable,
    )  # fmt: skip
    assert trainer._loop.scale.correction._repeatable is disable


@pytest.mark.parametrize(
    "name", ["attention_dropout", "dropout", "attn_pdrop", "jitter_noise", "rank_dropout"]
)
def test_dropout_is_found_in_layers_and_in_rates(name):
    module = nn.Linear(2, 2)
    for rate in (0.0, 0.1):
        # An adapter's rates have its name.
        setattr(module, name, {"default": rate} if name == "rank_dropout" else rate)
        assert has_dropout(nn.Sequential(module)) is (rate > 0)
        assert has_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(rate))) is (rate > 0)


@pytest.mark.parametrize(
    ("clipped", "repeatable", "own_pass"), [(0, True, False), (3, True, True), (3, False, False)]
)
def test_few_means_few_tokens_not_few_episodes(clipped, repeatable, own_pass):
    """One clipped episode of four: the one that holds most of the tokens, or a short one."""
    weight = nn.Parameter(torch.ones(1))
    correction = ClipBiasCorrection([weight], repeatable=repeatable)
    tokens = torch.tensor([90, 10, 10, 10])
    terms = weight * torch.ones(4, 2)
    is_clipped = torch.zeros(4, 2, dtype=torch.bool)
    is_clipped[clipped, 1] = True
    surrogate = SimpleNamespace(clipped=terms * is_clipped, is_clipped=is_clipped)
    later = correction.observe(surrogate, torch.full((4, 2), 0.5), None, tokens)
    if own_pass:
        assert [part.tolist() for part in later] == [[clipped], [[0.0, 0.5]]]
    assert (later is not None) is own_pass
    weight.grad = torch.ones(1)
    assert correction.finish(None, None)[1]["clip_bias/norm"] == (0.0 if own_pass else 0.5)
