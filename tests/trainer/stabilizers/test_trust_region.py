"""`trust_region`: what it measures, what it takes back, and what it leaves alone, through `train()`."""

import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from tests.kit.builders import LIMITS, TEXT, at_step, build
from tests.kit.fakes import char_tokenizer, tiny_policy
from tests.kit.scripted import (
    InFloat64,
    batch_logprobs,
    logged,
    numbered_rows,
    policy_parameters,
    scripted_trainer,
    weights,
)
from trl_stppo import STGRPOTrainer, STPPOConfig, STPPOTrainer
from trl_stppo.trainer.stabilizers import TrustRegion
from trl_stppo.trainer.stabilizers.share import Share
from trl_stppo.trainer.verdict import Verdict

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


def region(**spread) -> TrustRegion:
    one = TrustRegion(SimpleNamespace(desired_kl=0.1))
    one.begin_update(spread.get("spread", 1.0), trains=True)
    return one


def mini_batch(one: TrustRegion, kl: float, *, turns: float = 40, step: bool = True) -> str:
    """Train on a mini-batch with this KL per turn; return the verdict."""
    one.start_mini_batch()
    one._sums = torch.tensor([kl * turns, turns], dtype=torch.float64)
    one.measure(lambda x: x, CPU)
    if one.exceeds:
        if one.has_moved:
            one.take_back([])
            return "taken back"
        one.refuse()
        return "refused"
    if step:
        one.keep([], on_device=True)
    return "step"


def look(one: TrustRegion, kl: float, *, turns: float = 40) -> None:
    """Measure the KL after the update's last step."""
    one.start_mini_batch()
    one._sums = torch.tensor([kl * turns, turns], dtype=torch.float64)
    one.measure(lambda x: x, CPU)
    one.take_back([]) if one.exceeds else one.end_update()


def test_an_update_by_hand():
    one = region()
    assert [mini_batch(one, kl) for kl in (0.0, 0.01, 0.39, 0.03)] == ["step"] * 4
    look(one, 0.02)
    assert one.factor == pytest.approx(0.15)
    one.begin_update(1.0, trains=True)
    assert [mini_batch(one, kl) for kl in (0.0, 0.9, 0.9, 0.9)] == [
        "step", "taken back", "refused", "refused",
    ]  # fmt: skip
    assert one.factor == pytest.approx(0.15 / 3), "one change for three mini-batches"
    assert one.state.taken_back == 1
    assert not one.is_unseen, "no step is left to look at"


def test_a_step_after_one_taken_back_can_be_taken_back_too_and_nothing_grows():
    one = region()
    kls = (0.0, 0.9, 0.01, 0.9)
    assert [mini_batch(one, kl) for kl in kls] == ["step", "taken back", "step", "taken back"]
    assert one.factor == pytest.approx(0.1 / 9)
    one.begin_update(1.0, trains=True)
    assert [mini_batch(one, kl) for kl in (0.0, 0.9, 0.01)] == ["step", "taken back", "step"]
    look(one, 0.001)
    assert one.factor == pytest.approx(0.1 / 27), "an update with a refusal does not grow"


def test_the_last_step_is_judged_like_the_others():
    one = region()
    mini_batch(one, 0.0)
    look(one, 0.41)
    assert (one.state.taken_back, one.factor) == (1, pytest.approx(0.1 * math.sqrt(0.1 / 0.41)))
    assert not one.has_moved
    one.begin_update(1.0, trains=True)
    before = one.factor
    mini_batch(one, 0.0)
    look(one, 0.3)
    assert one.factor == pytest.approx(before * math.sqrt(1 / 3))


def test_rounding_is_no_step():
    one = region()
    assert [mini_batch(one, kl) for kl in (0.03, 0.03, 0.14, 0.16, 0.44)] == ["step"] * 4 + [
        "taken back"
    ]
    assert one.floor == pytest.approx(0.03)
    small = region()
    small.allowed_kl = 0.001
    # Four times the rounding error is the limit where the allowed KL is smaller.
    assert [mini_batch(small, kl) for kl in (0.03, 0.149, 0.151)] == ["step", "step", "taken back"]


def test_few_turns_decide_nothing_alone_and_move_the_factor_together():
    one = region()
    one.least_turns = 32
    for count in range(3):
        one.begin_update(1.0, trains=True)
        assert mini_batch(one, 0.0, turns=12) == "step"
        look(one, 9.0 if count == 0 else 0.0, turns=12)
        assert one.state.taken_back == 0
        expected = 0.1 if count < 2 else 0.1 * 0.25
        assert one.factor == pytest.approx(expected)


def test_what_is_allowed_follows_the_spread_of_rollouts_that_train():
    one = TrustRegion(SimpleNamespace(desired_kl=0.1))
    one.begin_update(50.0, trains=False)
    for _ in range(3):
        one.begin_update(0.3, trains=True)
    assert one.allowed_kl == pytest.approx(0.1)
    one.begin_update(0.15, trains=True)
    assert one.allowed_kl == pytest.approx(0.1 * (0.15 / (0.3 * 0.5 ** (1 / 50))) ** 2)
    one.begin_update(0.0, trains=True)
    assert one.allowed_kl == pytest.approx(0.001)
    mini_batch(one, 0.0)
    look(one, 1e-6)
    assert one.factor == 0.1, "nothing to gain, so nothing grows"


def test_its_state_goes_on():
    whole, half, other = region(), region(), TrustRegion(SimpleNamespace(desired_kl=0.1))
    for one in (whole, half):
        mini_batch(one, 0.0)
        look(one, 0.3)
    other.load_state_dict(half.state_dict())
    for one in (whole, other):
        one.begin_update(0.5, trains=True)
        mini_batch(one, 0.0)
        look(one, 0.01)
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


@pytest.mark.parametrize(("region", "factor"), [(False, 0.25**4), (True, 0.25)])
def test_share_has_a_power_of_one_beside_it(region, factor):
    share = Share(SimpleNamespace(has_trust_region=region))
    assert float(share.scale(torch.tensor(1.0), torch.tensor(3.0))) == pytest.approx(factor)


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
        trainer._guards.judge = lambda *facts: (
            self.verdicts.append(judge(*facts)) or self.verdicts[-1]
        )


def trained(folder, ruin: Ruin, **options):
    trainer, _ = scripted_trainer(folder, callbacks=[ruin], **{**RUN, **options})
    ruin.watch(trainer)
    trainer.train()
    return trainer


def equal(one: dict, other: dict, part: str) -> bool:
    return all(torch.equal(w, other[n]) for n, w in one.items() if n.startswith(part))


@pytest.mark.parametrize("kind", ["separate", "shared"])
def test_a_ruin_is_undone_to_the_bit_at_the_next_mini_batch(kind, tmp_path):
    options = {}
    if kind == "shared":
        options = {"model": tiny_policy(char_tokenizer()), "peft_config": LoraConfig(**LORA)}
        # The last norm bounds what the adapters of this model can do.
        options |= {"trainer_class": STPPOTrainer, "desired_kl": 1e-4}
    ruin = Ruin(2, by=1e7)
    trainer = trained(tmp_path, ruin, **options)
    assert ruin.verdicts[:3] == [Verdict.TAKEN, Verdict.TAKEN, Verdict.TAKEN_BACK]
    assert not equal(ruin.before[1], ruin.after[1], "policy"), "the ruin was there"
    assert equal(ruin.before[1], ruin.after[2], "policy"), "and is undone by the next mini-batch"
    assert not equal(ruin.after[1], ruin.after[2], "critic"), "which trains the critic"
    assert logged(trainer, "step/taken_back")[2] == 1
    assert logged(trainer, "guard/skipped_steps") == [0] * 8


class Watches(TrainerCallback):
    """Weights when an evaluation, a save and a rollout begin."""

    def __init__(self) -> None:
        self.trainer, self.seen = None, {}

    def on_optimizer_step(self, *args, **kwargs):
        self.seen["callback"] = weights(self.trainer)

    def on_evaluate(self, *args, **kwargs):
        self.seen["evaluation"] = weights(self.trainer)

    def on_save(self, *args, **kwargs):
        self.seen["save"] = weights(self.trainer)


@pytest.mark.parametrize("last", [4, 6])
def test_a_ruin_in_the_last_step_is_undone_before_anything_sees_it(last, tmp_path):
    """Step 4 ends an update; a run of six steps ends inside the next one."""
    ruin, watches = Ruin(last), Watches()
    options = {
        **RUN, "max_steps": last, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps",
        "eval_steps": 2, "eval_dataset": numbered_rows(), "per_device_eval_batch_size": 8,
    }  # fmt: skip
    trainer, _ = scripted_trainer(tmp_path, callbacks=[ruin, watches], **options)
    ruin.trainer = watches.trainer = trainer
    trainer.train()
    assert set(watches.seen) == {"callback", "evaluation", "save"}
    for name, seen in {**watches.seen, "end": weights(trainer)}.items():
        assert equal(ruin.before[-1], seen, "policy"), name
    assert logged(trainer, "step/taken_back")[-1] == 1
    *_, before, after = logged(trainer, "step/factor")
    assert after < before / 2


def test_a_ruin_before_a_callback_ends_the_run_is_undone_and_a_new_run_begins_anew(tmp_path):
    ruin = Ruin(2)
    stop = at_step(
        "on_step_end", 2, lambda: setattr(ruin.trainer.control, "should_training_stop", True)
    )
    trainer, _ = scripted_trainer(tmp_path, callbacks=[ruin, stop], **RUN, save_strategy="no")
    ruin.watch(trainer)
    trainer.train()
    assert trainer.state.global_step == 2
    assert equal(ruin.before[1], weights(trainer), "policy")
    region = trainer._loop.region
    assert region.state.taken_back == 1
    trainer.remove_callback(stop)
    ruin.steps = ()
    trainer.train()
    assert trainer.state.global_step == 8
    assert region.state.taken_back == 0, "the state of the first run is forgotten"


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_kl_is_that_of_the_policy_since_the_start_of_the_update(staleness, tmp_path):
    """Against a loop over the tokens of the last mini-batch, in float64, after every update."""
    found, expected = [], []

    class Float64(InFloat64, STPPOTrainer):
        pass

    options = {**RUN, "trainer_class": Float64, "max_steps": 16, "rollout_staleness": staleness}
    trainer, _ = scripted_trainer(tmp_path, **options, desired_kl=1e6, kl_coef=0.0)
    loop, starts = trainer._loop, []
    rollout = loop.rollout

    def begins(rows):
        batch = rollout(rows)
        starts.append({n: p.detach().clone() for n, p in trainer.model.named_parameters()})
        return batch

    loop.rollout = begins
    look = loop.look

    def looks():
        unseen = loop.region.is_unseen
        look()
        if not unseen:
            return
        found.append(loop.region.kl + loop.region.floor)
        present = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        total, turns = 0.0, set()
        for inputs in loop.mini_batch.parts:
            new = batch_logprobs(trainer.model, inputs)
            trainer.model.load_state_dict(starts[-1], strict=False)
            start = batch_logprobs(trainer.model, inputs)
            trainer.model.load_state_dict(present, strict=False)
            for b, t in inputs["loss_mask"].nonzero().tolist():
                x = float(new[b, t]) - float(start[b, t])
                total += math.exp(x) - 1 - x
                turns.add((id(inputs), b, int(inputs["turn_index"][b, t])))
        expected.append(total / len(turns))

    loop.look = looks
    trainer.train()
    assert len(found) == 4
    assert min(expected) > 1e-9
    assert found == pytest.approx(expected, rel=1e-6)


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
    assert logged(trainer, "step/taken_back")[-1] == 0
    assert set(logged(trainer, "step/factor")) == {0.1}
    assert max(logged(trainer, "step/kl_floor")) < 1.0


def broken_at(trainer, *steps):
    """The policy's log-probabilities are not finite in some steps, counted from 1."""
    passes = trainer._forward.policy

    def policy(*args, entropy=False, **kwargs):
        logprobs, *others = passes(*args, entropy=entropy, **kwargs)
        broken = entropy and trainer.state.global_step + 1 in steps
        return (logprobs * torch.nan if broken else logprobs, *others)

    trainer._loop.forward.policy = policy


def test_a_policy_that_is_not_finite_after_a_step_is_taken_back_and_no_skip(tmp_path):
    ruin = Ruin()
    trainer, _ = scripted_trainer(tmp_path, callbacks=[ruin], **RUN)
    ruin.watch(trainer)
    broken_at(trainer, 3, 5)
    trainer.train()
    expected = [Verdict.TAKEN] * 8
    expected[2], expected[4] = Verdict.TAKEN_BACK, Verdict.NOT_FINITE
    assert ruin.verdicts == expected
    assert equal(ruin.before[1], ruin.after[2], "policy")
    assert not equal(ruin.after[1], ruin.after[2], "critic")
    assert equal(ruin.after[3], ruin.after[4], ""), "the first mini-batch is skipped as without it"
    assert logged(trainer, "guard/skipped_steps")[-1] == 1
    assert logged(trainer, "step/factor")[2] == pytest.approx(0.025)


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
    arguments = {
        "reward_funcs": lambda completions, **_: [float(len(c[-1]["content"])) for c in completions]
    }
    trainer = build(
        tmp_path, STGRPOTrainer, arguments=arguments, stabilizers=["trust_region", "share"],
        num_generations=4, num_ppo_epochs=2, max_steps=8, desired_kl=1e-7,
    )  # fmt: skip
    trainer.train()
    region = trainer._loop.region
    assert region.state.largest == 0.0
    assert len(region.state.spreads) == 2
    assert max(region.state.spreads) > 1.5, "a scaled advantage has a deviation of 1"
    assert logged(trainer, "step/taken_back")[-1] > 0


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
    scaled, _ = moved("region", stabilizers=["trust_region"], desired_kl=1e9)
    for one, other in zip(plain, scaled, strict=True):
        torch.testing.assert_close(other, 0.1 * one, rtol=1e-5, atol=1e-9)


def test_norms_are_estimated_beside_it(tmp_path):
    both = STPPOConfig(str(tmp_path), stabilizers=["trust_region", "share"])
    assert (both.takes_second_gradient, both.scales_step) == (False, True)
    assert STPPOConfig(str(tmp_path), stabilizers=["share"]).takes_second_gradient


def test_an_update_that_target_kl_stops_shortens_later_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(TrustRegion, "exceeds", False)
    trainer, _ = scripted_trainer(tmp_path, **RUN, target_kl=1e-12, desired_kl=1e-14)
    trainer.train()
    assert logged(trainer, "guard/kl_stopped_steps")[3] == 3
    assert logged(trainer, "step/factor")[:5] == pytest.approx([0.1] + [0.025] * 4)


def test_target_kl_forbids_growth():
    one = region()
    mini_batch(one, 0.0)
    mini_batch(one, 0.001, step=False)
    one.refuse()
    one.end_update()
    assert one.factor == 0.1
    assert one.has_ended


@pytest.mark.parametrize("gradient_only", [True, False])
def test_a_broken_critic_does_not_decide_on_the_policy(gradient_only, tmp_path):
    """Its gradient in step 4 does not keep the ruin of step 3; its loss in step 4 takes nothing back."""
    ruin = Ruin(*([3] if gradient_only else []))
    trainer, _ = scripted_trainer(tmp_path, callbacks=[ruin], **RUN)
    ruin.watch(trainer)
    value_loss = trainer._loop.value_loss

    def broken(inputs):
        loss = value_loss(inputs)
        if trainer.state.global_step + 1 == 4:
            gradients = trainer._optimizer_step.critic_grads._grads
            gradients[0] = gradients[0] * math.nan
            loss = loss if gradient_only else loss * math.nan
        return loss

    trainer._loop.value_loss = broken
    trainer.train()
    if gradient_only:
        assert ruin.verdicts[3] is Verdict.TAKEN_BACK
        assert equal(ruin.before[2], ruin.after[3], "policy")
    else:
        assert ruin.verdicts[3] is Verdict.NOT_FINITE
        assert equal(ruin.after[2], ruin.after[3], "policy")
        assert logged(trainer, "step/taken_back")[-1] == 0
    assert equal(ruin.after[2], ruin.after[3], "critic")


def test_an_empty_mini_batch_at_the_end_hides_no_ruin(tmp_path):
    ruin = Ruin(3)
    trainer, _ = scripted_trainer(tmp_path, callbacks=[ruin], **{**RUN, "max_steps": 4})
    ruin.watch(trainer)
    open_mini_batch = trainer._loop.open_mini_batch

    def empties(window):
        if trainer.state.global_step == 3:
            off = ("loss_mask", "value_mask")
            window = [{**each, **{n: torch.zeros_like(each[n]) for n in off}} for each in window]
        return open_mini_batch(window)

    trainer._loop.open_mini_batch = empties
    trainer.train()
    assert not equal(ruin.before[2], ruin.after[2], "policy")
    assert equal(ruin.before[2], weights(trainer), "policy")


def test_a_callback_that_ends_the_epoch_inside_an_update_leaves_no_ruin(tmp_path):
    ruin = Ruin(2)
    stop = at_step(
        "on_step_end", 2, lambda: setattr(ruin.trainer.control, "should_epoch_stop", True)
    )
    options = {**RUN, "max_steps": 4, "save_strategy": "epoch"}
    trainer, _ = scripted_trainer(tmp_path, callbacks=[ruin, stop], **options)
    ruin.watch(trainer)
    trainer.train()
    assert equal(ruin.before[1], weights(trainer), "policy")
    assert (tmp_path / f"checkpoint-{trainer.state.global_step}").is_dir()


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
