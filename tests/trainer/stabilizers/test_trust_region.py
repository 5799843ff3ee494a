"""`trust_region`: what it measures, what it refuses, and what it leaves alone, through `train()`."""

import copy
import math
import os
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from tests.kit.builders import LIMITS, TEXT, build
from tests.kit.fakes import char_tokenizer, tiny_policy
from tests.kit.scripted import (
    InFloat64,
    batch_logprobs,
    logged,
    policy_parameters,
    scripted_trainer,
    weights,
)
from trl_stppo import STGRPOTrainer, STPPOConfig, STPPOTrainer
from trl_stppo.core.trust_region import Region
from trl_stppo.trainer.stabilizers import TrustRegion
from trl_stppo.trainer.step import Verdict

CPU = torch.device("cpu")
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
# An update of four steps: two epochs of two mini-batches.
RUN = {
    "variant": "st-ppo", "stabilizers": ["trust_region"], "optim": "sgd", "learning_rate": 1e-2,
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_mini_batches": 2,
    "num_ppo_epochs": 2, "max_steps": 8, "staleness": 0.0, "max_grad_norm": 0.5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def few_turns(monkeypatch):
    """A mini-batch of the tests has about ten turns."""
    monkeypatch.setattr(TrustRegion, "least_turns", 4)


# ----------------------------------------------------------------------------------------- by hand


CONFIG = SimpleNamespace(desired_kl=0.1, steps_per_rollout=4)


def region() -> TrustRegion:
    one = TrustRegion(CONFIG)
    one.state = replace(one.state, starts=False)
    one.begin_update(1.0, trains=True)
    return one


def mini_batch(
    one: TrustRegion,
    kl: float,
    *,
    turns: float = 40,
    other: Verdict | None = None,
    ends: bool = False,
) -> str:
    """Train on a mini-batch with this KL per turn; return the verdict, or `other` if there is one."""
    one.start_mini_batch()
    one._sums = torch.tensor([kl * turns, turns], dtype=torch.float64)
    one.measure(lambda x: x, CPU)
    verdict = other or (Verdict.REFUSED if one.exceeds else Verdict.TAKEN)
    one.apply(takes=verdict is Verdict.TAKEN, refused=verdict is Verdict.REFUSED, ends_update=ends)
    return "step" if verdict is Verdict.TAKEN else str(verdict)


def update(one: TrustRegion, *kls: float, turns: float = 40, spread: float = 1.0) -> list[str]:
    """Train on an update of a mini-batch before the first step and of mini-batches with these KLs."""
    one.begin_update(spread, trains=True)
    *first, last = (0.0, *kls)
    verdicts = [mini_batch(one, kl, turns=turns) for kl in first]
    return [*verdicts, mini_batch(one, last, turns=turns, ends=True)][1:]


def test_an_update_by_hand():
    one = region()
    assert update(one, 0.01, 0.39, 0.02) == ["step"] * 3
    assert one.factor == pytest.approx(0.15)
    assert update(one, 0.9, 0.9, 0.9) == ["refused"] * 3
    assert one.factor == pytest.approx(0.15 / 3), "one change for three mini-batches"
    assert one.refused == 3
    assert update(one, 0.3) == ["step"]
    assert one.factor == pytest.approx(0.15 / 3 * math.sqrt(1 / 3))


def test_a_step_after_a_refused_one_can_be_too_large_again_and_nothing_grows():
    one = region()
    assert update(one, 0.9, 0.01, 0.9) == ["refused", "step", "refused"]
    assert one.factor == pytest.approx(0.1 / 9)
    assert update(one, 0.9, 0.01, 0.001) == ["refused", "step", "step"]
    assert one.factor == pytest.approx(0.1 / 27), "an update with a refusal does not grow"


def test_the_first_updates_may_enlarge_steps_more_until_one_comes_near_the_allowed_kl():
    one = TrustRegion(CONFIG)
    update(one, 0.1 / 64)
    assert one.factor == pytest.approx(0.4), "half of the square root of 64"
    update(one, 0.1 / 16)
    assert one.factor == pytest.approx(0.8)
    update(one, 0.1 / 8)
    assert (one.factor, one.state.starts) == (1.0, False), "the learning rate is the largest step"
    one.state = replace(one.state, factor=0.1)
    update(one, 0.1 / 64)
    assert one.factor == pytest.approx(0.15)
    refused = TrustRegion(CONFIG)
    update(refused, 0.9)
    update(refused, 0.1 / 64)
    assert refused.factor == pytest.approx(0.1 / 3 * 1.5), "a refusal ends the first updates, too"


@pytest.mark.parametrize("ratio", [0.0, -0.5])
def test_a_kl_that_is_lost_in_rounding_changes_nothing(ratio):
    region = Region().after_update(ratio, 64.0, may_grow=True)
    assert (region.factor, region.starts) == (0.1, True)
    assert region.after_update(1 / 64, 64.0, may_grow=True).factor == pytest.approx(0.4)


def test_rounding_is_no_step():
    one = region()
    mini_batch(one, 0.03)
    kls = (0.03, 0.14, 0.16, 0.44)
    assert [mini_batch(one, kl) for kl in kls] == ["step"] * 3 + ["refused"]
    assert one.floor == pytest.approx(0.03)
    small = region()
    small.allowed_kl = 0.001
    # Four times the rounding error is the limit where the allowed KL is smaller.
    assert [mini_batch(small, kl) for kl in (0.03, 0.149, 0.151)] == ["step", "step", "refused"]


def test_few_turns_decide_nothing_alone_and_move_the_factor_together():
    one = region()
    one.least_turns = 32
    for count in range(3):
        assert update(one, 9.0 if count == 0 else 0.0, turns=12) == ["step"]
        assert one.factor == pytest.approx(0.1 if count < 2 else 0.1 * 0.25)


def test_an_update_of_one_step_is_not_scaled():
    one = TrustRegion(SimpleNamespace(desired_kl=0.1, steps_per_rollout=1))
    assert one.factor == 1.0
    assert one.figures()["step/factor"] == 1.0


def test_what_is_allowed_follows_the_spread_of_rollouts_that_train():
    one = TrustRegion(CONFIG)
    one.begin_update(50.0, trains=False)
    for _ in range(3):
        one.begin_update(0.3, trains=True)
    assert one.allowed_kl == pytest.approx(0.1)
    one.begin_update(0.15, trains=True)
    assert one.allowed_kl == pytest.approx(0.1 * (0.15 / (0.3 * 0.5 ** (1 / 50))) ** 2)
    one.begin_update(0.0, trains=True)
    assert one.allowed_kl == pytest.approx(0.001)
    update(one, 1e-6, spread=0.0)
    assert one.factor == 0.1, "nothing to gain, so nothing grows"


def test_its_state_goes_on():
    whole, half, other = region(), region(), TrustRegion(CONFIG)
    for one in (whole, half):
        update(one, 0.3)
    other.load_state_dict(half.state_dict())
    for one in (whole, other):
        update(one, 0.01, spread=0.5)
    assert other.state_dict() == whole.state_dict()
    assert other.allowed_kl == whole.allowed_kl


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_desired_kl_is_checked(value, tmp_path):
    with pytest.raises(ValueError, match="desired_kl"):
        STPPOConfig(str(tmp_path), stabilizers=["trust_region"], desired_kl=value)


def test_dropout_is_refused(tmp_path):
    with pytest.raises(ValueError, match="disable_dropout=False"):
        STPPOConfig(str(tmp_path), stabilizers=["trust_region"], disable_dropout=False)


# ------------------------------------------------------------------------------------ whole trainings


class Ruin(TrainerCallback):
    """Multiplies the policy's gradient at some steps, counted from 1, after clipping; keeps weights."""

    def __init__(self, *steps: int, by: float = 1e4) -> None:
        self.steps, self.by = steps, by
        self.trainer, self.before, self.after, self.verdicts = None, [], [], []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.before.append(weights(self.trainer))
        if state.global_step + 1 in self.steps:
            for parameter in policy_parameters(self.trainer).values():
                if parameter.grad is not None:
                    parameter.grad.mul_(self.by)

    def on_step_end(self, *args, **kwargs):
        self.after.append(weights(self.trainer))

    def watch(self, trainer):
        """Note the verdicts of a trainer."""
        self.trainer, judge = trainer, trainer._guards.judge
        trainer._guards.judge = lambda *facts, **more: (
            self.verdicts.append(judge(*facts, **more)) or self.verdicts[-1]
        )


def trained(folder, ruin: Ruin, **options):
    trainer, _ = scripted_trainer(folder, callbacks=[ruin], **{**RUN, **options})
    ruin.watch(trainer)
    trainer.train()
    return trainer


def equal(one: dict, other: dict, part: str) -> bool:
    return all(torch.equal(w, other[n]) for n, w in one.items() if n.startswith(part))


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_a_step_that_is_too_large_is_the_last_one_of_its_update(kind, tmp_path):
    options = {}
    if kind == "shared":
        options = {"model": tiny_policy(char_tokenizer()), "peft_config": LoraConfig(**LORA)}
        # The last norm bounds what the adapters of this model can do.
        options |= {"trainer_class": STPPOTrainer, "desired_kl": 1e-4}
    ruin = Ruin(2, by=1e7)
    trainer = trained(tmp_path, ruin, **options)
    assert ruin.verdicts[:4] == [Verdict.TAKEN] * 2 + [Verdict.REFUSED] * 2
    assert not equal(ruin.before[1], ruin.after[1], "policy"), "the ruin was there"
    assert equal(ruin.after[1], ruin.after[3], "policy"), "nothing more moves the policy"
    assert not equal(ruin.after[1], ruin.after[2], "critic"), "but the critic"
    factors = logged(trainer, "step/factor")
    assert factors[2:4] == pytest.approx([factors[1] / 4] * 2), "later steps are shorter"
    assert logged(trainer, "step/refused")[3] == 2
    assert logged(trainer, "guard/skipped_steps") == [0] * 8


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_kl_is_that_of_the_policy_since_the_start_of_the_update(staleness, tmp_path):
    """Against a loop over the tokens of every mini-batch, in float64, before its step."""
    found, expected = [], []

    class Float64(InFloat64, STPPOTrainer):
        pass

    options = {**RUN, "trainer_class": Float64, "max_steps": 16, "rollout_staleness": staleness}
    trainer, _ = scripted_trainer(tmp_path, **options, desired_kl=1e6, kl_coef=0.0)
    loop, starts = trainer._loop, []
    rollout, measure = loop.rollout, loop.region.measure

    def present():
        model = copy.deepcopy(trainer.model)
        # The instance's method is bound to the original.
        del model.forward
        return model

    def begins(rows):
        batch = rollout(rows)
        starts.append(present())
        return batch

    def measures(*args):
        measure(*args)
        found.append(loop.region.kl + loop.region.floor)
        total, turns, now = 0.0, set(), present()
        for inputs in loop.mini_batch.parts:
            new, start = (batch_logprobs(model, inputs) for model in (now, starts[-1]))
            for b, t in inputs["loss_mask"].nonzero().tolist():
                x = float(new[b, t]) - float(start[b, t])
                total += math.exp(x) - 1 - x
                turns.add((id(inputs), b, int(inputs["turn_index"][b, t])))
        expected.append(total / len(turns))

    loop.rollout, loop.region.measure = begins, measures
    trainer.train()
    assert len(found) == 16
    assert sorted(expected)[-12] > 1e-9, "the first mini-batch of an update has no KL"
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-15)


@pytest.mark.long
@pytest.mark.parametrize("options", [
    {"bf16": True}, {"bf16": True, "max_turn_tokens": 60, "max_completion_length": 200},
    {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    {"rollout_staleness": 1}, {"num_ppo_epochs": 1, "num_mini_batches": 1},
])  # fmt: skip
def test_no_step_of_rate_0_is_refused(options, tmp_path):
    """Rounding, of autocast and of other packs, is the whole KL; the allowed KL is at its floor."""
    settings = {**LIMITS, "num_ppo_epochs": 2, "max_steps": 8, **options}
    trainer = build(
        tmp_path, STPPOTrainer, arguments=TEXT, stabilizers=["trust_region", "share"],
        learning_rate=0.0, desired_kl=1e-6, **settings,
    )  # fmt: skip
    trainer.train()
    assert logged(trainer, "step/refused")[-1] == 0
    one_step = trainer.args.steps_per_rollout == 1
    assert set(logged(trainer, "step/factor")) == {1.0 if one_step else 0.1}
    assert max(logged(trainer, "step/kl_floor")) < 1.0


def test_the_spread_is_that_of_raw_advantages_and_of_unwhitened_rewards(tmp_path):
    for number, options in enumerate(({}, {"whiten_rewards": True})):
        trainer, _ = scripted_trainer(tmp_path / str(number), **RUN, **options, kl_coef=0.0)
        spreads, begin = [], trainer._loop.region.begin_update

        def begins(spread, *, trains, begin=begin, spreads=spreads):
            spreads.append(spread)
            begin(spread, trains=trains)

        trainer._loop.region.begin_update = begins
        trainer.train()
        stds = [e["advantage/std"] for e in trainer.state.log_history if "advantage/std" in e]
        if not options:
            assert spreads == pytest.approx(stds, rel=1e-6)
            plain = spreads
        else:
            # Only the critic's values differ, which are small at first.
            assert spreads[0] == pytest.approx(plain[0], rel=0.1)
            assert stds[0] > 1.5 * plain[0]


def test_groups_have_one_too_and_their_spread_is_unscaled(tmp_path):
    arguments = {"reward_funcs": lambda completions, **_: [8.0 * len(c[-1]["content"]) for c in completions]}
    trainer = build(
        tmp_path, STGRPOTrainer, arguments=arguments, stabilizers=["trust_region", "share"],
        num_generations=4, num_ppo_epochs=2, max_steps=8, desired_kl=1e-7,
    )  # fmt: skip
    trainer.train()
    region = trainer._loop.region
    assert region.state.largest == 0.0
    assert len(region.state.spreads) == 2
    assert max(region.state.spreads) > 1.5, "a scaled advantage has a deviation of 1"
    assert logged(trainer, "step/refused")[-1] > 0


def test_a_step_is_scaled_with_its_weight_decay_and_other_factors(tmp_path):
    """One step of SGD moves the policy in proportion to the factor."""
    settings = {
        "max_steps": 1,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
    }

    def moved(folder, **options):
        trainer, _ = scripted_trainer(tmp_path / folder, **settings, **options)
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.train()
        after = trainer.model.parameters()
        return [b - a for a, b in zip(before, after, strict=True)], trainer

    plain, _ = moved("plain", variant="ppo")
    scaled, _ = moved("region", stabilizers=["trust_region"], desired_kl=1e9, num_ppo_epochs=2)
    for one, other in zip(plain, scaled, strict=True):
        torch.testing.assert_close(other, 0.1 * one, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("other", [Verdict.NOT_FINITE, Verdict.EMPTY])
def test_an_update_without_all_of_its_steps_does_not_grow(other):
    one = region()
    mini_batch(one, 0.0)
    mini_batch(one, 0.001)
    mini_batch(one, float("nan"), other=other, ends=True)
    assert (one.factor, one.refused) == (0.1, 0)


def test_a_signal_in_the_last_pass_of_a_rollout_leaves_the_state_before_it(tmp_path):
    options = {**RUN, "learning_rate": 0.2, "rollout_staleness": 1, "max_steps": 12}
    whole, _ = scripted_trainer(tmp_path / "whole", **options)
    whole.train()
    ended, _ = scripted_trainer(tmp_path / "ended", **options)
    values = ended._loop.rollout_values

    def interrupts(batch):
        if ended.state.global_step == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return values(batch)

    ended._loop.rollout_values = interrupts
    ended.train()
    assert (ended.state.global_step, ended.stop_reason) == (8, "signal SIGTERM")
    resumed, _ = scripted_trainer(tmp_path / "ended", **options)
    resumed.train(resume_from_checkpoint=True)
    assert equal(weights(resumed), weights(whole), "")
    assert resumed._loop.region.state == whole._loop.region.state
