"""The gradient of the clipped terms is exact, for few clipped episodes and for many, however split."""

from itertools import product

import pytest
from peft import LoraConfig

from tests.kit.fakes import char_tokenizer, tiny_policy
from tests.kit.loss_reference import LossReference
from tests.kit.scripted import (
    EPISODES,
    assert_same,
    logged,
    norm,
    train,
)
from tests.kit.tiers import quick
from trl_stppo import STPPOTrainer

FIGURES = ("norm", "grad_norm", "scale", "cosine")
FEW, MOST = {2, 5}, set(range(EPISODES))


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
        tmp_path, variant=variant, loss_type=loss_type,
        max_completion_length=64, stale_episodes=episodes,
        staleness=1.5 if episodes is FEW else 3.0,
    )  # fmt: skip
    level = "turn" if variant == "st-ppo" else "token"
    reference = LossReference(recorder.batches[0], level, loss_type)
    assert norm(reference.bias) > 0.01 * norm(reference.g), "the case should be interesting"
    assert figures(trainer)["norm"] == pytest.approx([norm(reference.bias)], rel=1e-9)
    assert figures(trainer)["grad_norm"] == pytest.approx([norm(reference.g)], rel=1e-9)
    assert_same(recorder.grads[0], {name: -grad for name, grad in reference.g.items()})


TERMS = {"beta": 0.3, "entropy_coef": 0.2}


@pytest.mark.parametrize("options", quick([{}, TERMS, {"delta": 1.5}], TERMS))
def test_the_split_into_micro_batches_changes_nothing(options, tmp_path):
    runs = []
    for size in (8, 4, 2, 1):
        trainer, recorder = train(
            tmp_path / str(size), variant="st-ppo", stale_episodes=FEW,
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


def test_the_bias_is_exactly_0_where_nothing_is_clipped(tmp_path):
    trainer, _ = train(tmp_path, staleness=0.0)
    assert figures(trainer)["norm"] == [0.0]


@pytest.mark.long
def test_lora_and_the_fused_head_have_the_bias_of_the_recomputed_layers(tmp_path):
    runs = []
    for checkpointing in (False, True):
        trainer, recorder = train(
            tmp_path / str(checkpointing), trainer_class=STPPOTrainer,
            model=tiny_policy(char_tokenizer()), variant="st-ppo", stale_episodes=FEW, staleness=0.9,
            peft_config=LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
            gradient_checkpointing=checkpointing,
        )  # fmt: skip
        runs.append((figures(trainer), recorder.moved("policy"), recorder.moved("critic")))
    one, other = runs
    assert one[0]["norm"][0] > 0
    for name in FIGURES:
        assert one[0][name] == pytest.approx(other[0][name], rel=1e-4, abs=1e-6), name
    assert_same(one[1], other[1], 1e-4)
    assert_same(one[2], other[2], 1e-5)
