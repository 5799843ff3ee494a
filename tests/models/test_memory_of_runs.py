"""What a configuration, an engine and a hint make of a run's memory."""

from dataclasses import replace

import pytest

from tests.kit.builders import build, prompts
from tests.kit.published import qwen25
from trl_stppo import STPPOTrainer
from trl_stppo.models.memory import Setup, estimate
from trl_stppo.models.memory_of_runs import hints, settings_of, shared_out
from trl_stppo.models.shapes import critic_shape, geometry_of, policy_shape

SHAPE = geometry_of(policy_shape(qwen25("7B"), "float32"))
CRITIC = sum(p.numel() for p in critic_shape(qwen25("7B"), "float32").parameters())
FULL = Setup(
    geometry=SHAPE, weights=4 * SHAPE.parameters, critic_weights=4 * CRITIC,
    trainable=SHAPE.parameters, critic_trainable=CRITIC, full=True, critic_full=True,
    weight_bytes=4, rows=4, completion=4096, checkpointing=False, slots=16,
)  # fmt: skip
RANK = SHAPE.lora_parameters(16)
QLORA = replace(
    FULL, weights=SHAPE.four_bit_weights(), critic_weights=0, trainable=RANK, critic_trainable=RANK,
    adapters=4 * RANK, full=False, critic_full=False, four_bit=True, weight_bytes=2,
    trainable_bytes=2, rows=1, completion=256, checkpointing=True, optim="paged_adamw_8bit",
    slots=1,
)  # fmt: skip


def test_settings_of_a_configuration(tmp_path):
    def settings(**options):
        trainer = build(tmp_path, STPPOTrainer, arguments={"train_dataset": prompts(16)}, **options)
        return settings_of(trainer.args, 9)

    found = settings(
        gradient_accumulation_steps=4, num_mini_batches=2, local_rollout_forward_batch_size=7,
        max_completion_length=33, optim="adamw_torch", gradient_checkpointing=True,
        variant="st-ppo",
    )  # fmt: skip
    assert (found["rows"], found["prompt"], found["completion"]) == (4, 9, 33)
    assert (found["scoring_rows"], found["optim"], found["slots"]) == (7, "adamw_torch", 16)
    assert found["accumulates"]
    assert found["checkpointing"]
    assert found["bias_buffers"] == 1
    assert settings(variant="st-ppo", entropy_coef=0.1)["bias_buffers"] == 2
    assert settings(stabilizers=["winners", "share"])["bias_buffers"] == 0
    assert settings(variant="ppo", entropy_coef=0.1)["bias_buffers"] == 0


@pytest.mark.parametrize("engine", ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2"])
def test_an_engine_shares_out(engine):
    one, four = FULL, shared_out(FULL, engine, 4)
    n = FULL.trainable
    weights = {"DDP": 4 * n, "ZeRO-1": 3 * n, "ZeRO-2": 3 * n, "ZeRO-3": 1.5 * n, "FSDP2": n}
    c = FULL.critic_trainable
    others = {"DDP": 4 * n, "ZeRO-1": 2 * n + 2 * c}
    held = {"ZeRO-3": 2 * n, "FSDP2": 2 * n}
    assert four.weights == pytest.approx(weights[engine], rel=1e-6)
    assert four.other == pytest.approx(others.get(engine, 0), rel=1e-6)
    assert four.gathered == pytest.approx(held.get(engine, 0), rel=1e-6)
    assert shared_out(replace(FULL, slots=0), engine, 4).gathered == 0, "vLLM plays"
    assert four.trainable == (n if engine == "DDP" else n // 4)
    critic = {"DDP": 4 * c, "ZeRO-1": 3 * c, "ZeRO-2": 3 * c, "ZeRO-3": 1.5 * c, "FSDP2": c}
    assert four.critic_weights == pytest.approx(critic[engine], rel=1e-6)
    assert four.critic_trainable == one.critic_trainable // (1 if engine == "DDP" else 4)
    # Of adapters only the frozen weights are shared out, where an engine does that.
    four, pieces = shared_out(QLORA, engine, 4), engine in ("ZeRO-3", "FSDP2")
    assert four.weights == QLORA.weights // (4 if pieces else 1)
    assert four.trainable == QLORA.trainable
    assert four.other == (2 * RANK if engine == "DDP" else 0)
    assert four.gathered == QLORA.weights * pieces
    own = replace(QLORA, critic_weights=400)
    assert shared_out(own, engine, 4).critic_weights == (100 if pieces else 400)


def test_hints_say_what_they_save():
    found = dict(hints(FULL))
    now = estimate(FULL).peak
    saved = now - estimate(replace(FULL, checkpointing=True)).peak
    assert found["gradient_checkpointing=True"] == saved
    assert {"max_completion_length=2048", "optim=paged_adamw_8bit"} <= found.keys()
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert hints(QLORA) == []
