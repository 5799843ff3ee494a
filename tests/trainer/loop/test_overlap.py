"""`rollout_overlap`: the run with `rollout_staleness=1`, bit for bit, whatever the clocks do."""

import os
import signal
import threading
import time

import pytest
import torch
from transformers import TrainerCallback

from tests.kit.builders import at_step
from tests.kit.collective_run import TEMPLATE, qwen3_template
from tests.kit.fakes import char_tokenizer, tiny_policy
from tests.kit.launch import on_two_processes
from tests.kit.overlapping import (
    OVERLAP,
    STALE,
    SleepyEnv,
    assert_equal,
    end_of,
    rows,
    trainer_for,
)
from tests.kit.tiers import quick
from tests.kit.vllm_server import ModelSampler, attach, serving
from tests.kit.waiting import PATIENCE, wait_until
from trl_stppo.errors import EnvironmentFailureError, RolloutError
from trl_stppo.rollout import engine
from trl_stppo.trainer.overlap import PolicyCopy

PER_BLOCK = 2
SAVES = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 40}


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert wait_until(lambda: not rollout_threads(), 10)


def rollout_threads():
    return [thread for thread in threading.enumerate() if thread.name == "rollout"]


def ends(folder, kind="lora", **options):
    """The ends of a run with episodes one update old, and of the overlapped one."""
    found = []
    for name, way in (("stale", STALE), ("overlapped", OVERLAP)):
        trainer = trainer_for(folder / name, kind, **way, **options)
        trainer.train()
        found.append(end_of(trainer))
    return found


@pytest.fixture(scope="module")
def stale(tmp_path_factory):
    """The same run with `rollout_staleness=1`."""
    folder = tmp_path_factory.mktemp("stale")
    trainer = trainer_for(folder, **STALE, **SAVES)
    trainer.train()
    return folder, end_of(trainer)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with a checkpoint after every step; rollouts end at 2, 4, ..., the first epoch at 6"""
    folder = tmp_path_factory.mktemp("whole")
    trainer = trainer_for(folder, **OVERLAP, **SAVES)
    trainer.train()
    return folder, end_of(trainer)


def figures(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.long
def test_a_run_with_lora_and_a_shared_critic_is_the_same_with_overlap(whole, stale):
    assert_equal(whole[1], stale[1])


@pytest.mark.parametrize("kind", quick(["full", "separate", "groups"], "groups"))
def test_an_overlapped_run_is_the_run_with_episodes_one_update_old(kind, tmp_path):
    assert_equal(*ends(tmp_path, kind))


@pytest.mark.slow
@pytest.mark.parametrize("options", quick([
    {"stabilizers": ["winners"]},
    {"kl_coef": 0.0, "beta": 0.1, "shuffle_dataset": False},
    {"generation_slots": 3},
    {"max_grad_norm": 0.0, "num_ppo_epochs": 3, "max_steps": 15},
    {"gradient_checkpointing": True, "critic_warmup_steps": 2},
], {"stabilizers": ["winners"]}))  # fmt: skip
def test_it_is_so_with_other_settings(options, tmp_path):
    assert_equal(*ends(tmp_path, "full" if "stabilizers" in options else "lora", **options))


class Tools:
    """A tool environment; a model that does not call tools plays one turn."""

    def reset(self, letter: str = "a", **row: object) -> str:
        self._letter = letter
        return letter

    def look(self, place: str) -> str:
        """Look somewhere.\n\nArgs:\n    place: where."""
        return place

    def get_reward(self) -> float:
        return float(ord(self._letter) - ord("a"))


@pytest.mark.long
def test_turns_are_one_update_old_and_rollout_and_update_run_together(tmp_path):
    trainer = trainer_for(tmp_path, **OVERLAP)
    trainer.train()
    assert figures(trainer, "rollout/staleness_mean") == [0.0, *[PER_BLOCK] * 4]
    assert figures(trainer, "rollout/staleness_max") == [0.0, *[PER_BLOCK] * 4]
    drift = figures(trainer, "sampling/drift")
    assert drift[0] < 1e-6 < 1e-4 < min(drift[1:])
    assert max(figures(trainer, "sampling/sampling_logp_difference/mean")) < 1e-5
    assert figures(trainer, "guard/sampler_mismatch") == [0] * 5
    for name in ("perf/rollout_wait_seconds", "perf/rollout_idle_seconds", "perf/overlap"):
        assert len(figures(trainer, name)) == 4
    assert all(0.0 <= share <= 1.0 for share in figures(trainer, "perf/overlap"))


class Held(SleepyEnv):
    """Beside an update it answers only when the update has ended."""

    may_answer = threading.Event()

    def step(self, action):
        assert self.may_answer.wait(PATIENCE)
        return super().step(action)


class HoldsUpdates(TrainerCallback):
    """Ends the update before the rollout beside it may go on, or the other way round."""

    def __init__(self, trainer, *, rollout_first):
        self.trainer, self.rollout_first = trainer, rollout_first
        Held.may_answer.set()

    def on_step_begin(self, args, state, control, **kwargs):
        if not self.rollout_first:
            Held.may_answer.set()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        source = self.trainer._loop.source
        if self.rollout_first:
            source.settle()
        elif (state.global_step + 1) % PER_BLOCK:
            Held.may_answer.clear()


@pytest.mark.long
@pytest.mark.parametrize("rollout_first", [True, False])
def test_who_is_ready_first_decides_nothing(rollout_first, stale, tmp_path):
    trainer = trainer_for(tmp_path, **OVERLAP, arguments={"environment_factory": Held})
    trainer.add_callback(HoldsUpdates(trainer, rollout_first=rollout_first))
    trainer.train()
    assert_equal(end_of(trainer), stale[1])


@pytest.mark.long
def test_rewards_see_the_environments_of_their_own_episodes(tmp_path):
    """Environments are used again: the next rollout begins when all rewards are computed."""

    def reward(prompts, environments=None, letter=None, **_):
        time.sleep(0.05)
        return [float(env._letter == own) for env, own in zip(environments, letter, strict=True)]

    tokenizer = char_tokenizer()
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, qwen3_template
    given = {"environment_factory": Tools, "reward_funcs": [reward], "processing_class": tokenizer}
    limits = {"max_turns": None, "max_turn_tokens": None, "max_completion_length": 8}
    stale, overlapped = ends(tmp_path, arguments=given, **limits)
    means = [e["rewards/reward/mean"] for e in overlapped["log"] if "rewards/reward/mean" in e]
    assert set(means) == {1.0}
    assert_equal(stale, overlapped)


@pytest.mark.long
@pytest.mark.parametrize("step", quick(range(2, 10, 2), 2, 8))
def test_a_resumed_run_plays_the_rollout_under_way_again(step, whole, tmp_path):
    folder, expected = whole
    way = OVERLAP if step % 4 else STALE
    resumed = trainer_for(tmp_path, **way, **SAVES)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    end = end_of(resumed)
    assert_equal({**end, "trace": None}, {**expected, "trace": None})


@pytest.mark.long
def test_a_run_without_overlap_goes_on_with_it(whole, stale, tmp_path):
    resumed = trainer_for(tmp_path, **OVERLAP, **SAVES)
    resumed.train(resume_from_checkpoint=str(stale[0] / "checkpoint-4"))
    assert_equal({**end_of(resumed), "trace": None}, {**whole[1], "trace": None})


@pytest.mark.long
@pytest.mark.parametrize("number", quick([signal.SIGTERM, signal.SIGINT], signal.SIGTERM))
def test_a_signal_leaves_a_checkpoint_and_no_thread(number, whole, tmp_path, request):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    trainer = trainer_for(tmp_path, **OVERLAP, **SAVES)
    trainer.add_callback(at_step("on_pre_optimizer_step", 4, lambda: os.kill(os.getpid(), number)))
    trainer.train()
    assert trainer.state.global_step == 6
    assert wait_until(lambda: not rollout_threads(), 10)
    resumed = trainer_for(tmp_path, **OVERLAP, **SAVES)
    resumed.train(resume_from_checkpoint=True)
    assert_equal(end_of(resumed), whole[1])


@pytest.mark.long
def test_an_interrupt_ends_the_thread_and_another_training_begins_anew(whole, tmp_path):
    Held.may_answer.clear()
    given = {"environment_factory": Held}
    trainer = trainer_for(tmp_path, **OVERLAP, arguments=given)

    def interrupt():
        raise KeyboardInterrupt

    callback = at_step("on_pre_optimizer_step", 1, interrupt)
    trainer.add_callback(callback)
    Held.may_answer.set()
    original = trainer._loop.source._launch

    def launch(*steps):
        Held.may_answer.clear()
        original(*steps)

    trainer._loop.source._launch = launch
    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert time.monotonic() - before < 60
    assert wait_until(lambda: not rollout_threads(), 10)
    Held.may_answer.set()
    del trainer._loop.source._launch
    trainer.remove_callback(callback)
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps


@pytest.mark.long
def test_evaluations_wait_and_change_nothing(stale, tmp_path):
    found = ends(
        tmp_path, arguments={"eval_dataset": rows(6)}, eval_strategy="steps", eval_steps=3,
        per_device_eval_batch_size=8,
        eval_generation_kwargs={"temperature": 0.0, "max_completion_length": 8},
    )  # fmt: skip
    assert_equal(*found)
    assert all(torch.equal(stale[1]["weights"][n], w) for n, w in found[0]["weights"].items())


class Breaks(SleepyEnv):
    """Answers so many resets of all instances, then fails."""

    left = 10**6

    def reset(self, **row):
        type(self).left -= 1
        if self.left < 0:
            raise ConnectionError("no server")
        return super().reset(**row)


@pytest.mark.long
def test_environments_that_fail_in_flight_end_the_run_with_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "MAX_FAILURES_IN_A_ROW", 8)
    given = {"environment_factory": Breaks}
    trainer = trainer_for(tmp_path, **OVERLAP, arguments=given)
    Breaks.left = 16
    with pytest.raises(EnvironmentFailureError, match="no server"):
        trainer.train()
    assert trainer.state.global_step == 4
    assert (tmp_path / "checkpoint-4").is_dir()
    Breaks.left = 10**6
    resumed = trainer_for(tmp_path, **OVERLAP, arguments=given)
    resumed.train(resume_from_checkpoint=True)
    undisturbed = trainer_for(tmp_path / "whole", **OVERLAP, arguments=given)
    undisturbed.train()
    assert_equal({**end_of(resumed), "trace": None}, {**end_of(undisturbed), "trace": None})


@pytest.mark.long
def test_a_sampler_with_other_weights_is_named_and_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(PolicyCopy, "refresh", lambda self: None)
    trainer = trainer_for(tmp_path, "full", **OVERLAP, max_steps=20, kl_coef=0.0)
    monkeypatch.setattr(PolicyCopy, "why_unfit", lambda self: None)
    trainer.train()
    # Of the rollouts beside updates the first has the right weights; the third wrong one ends the run.
    assert "the sampler does not have the policy's weights" in trainer.stop_reason
    assert trainer.state.global_step == 4 * PER_BLOCK + 1
    assert figures(trainer, "guard/sampler_mismatch")[-1] == 3


@pytest.mark.long
def test_a_copy_shares_what_is_frozen_and_copies_the_policys_adapter_alone(tmp_path):
    trainer = trainer_for(tmp_path, "lora", **OVERLAP)
    trainer.train()
    copied = trainer._loop.source._copy
    policy = dict(trainer.model.named_parameters())
    own = {n for n, p in copied.model.named_parameters() if p is not policy[n]}
    assert own
    assert own == {n for n in policy if "lora_" in n and ".default." in n}
    assert copied.model.active_adapters == ["default"]
    assert all(p.requires_grad == policy[n].requires_grad for n, p in copied.model.named_parameters())


@pytest.fixture
def served(tmp_path):
    """A trainer, and a server that samples with a model of its own."""
    trainer = trainer_for(tmp_path, "full", **OVERLAP)
    model = tiny_policy(char_tokenizer())
    with serving(ModelSampler(model, trainer.eos_token_ids)) as server:
        yield trainer, server, attach(trainer, server)


@pytest.mark.long
def test_a_server_that_restarts_in_flight_ends_the_run_with_a_checkpoint(served, tmp_path):
    trainer, engine_server, _ = served
    launch, sample = trainer._loop.source._launch, engine_server.sample

    def forgetful(*turn):
        engine_server.weights = "default"
        return sample(*turn)

    def lose_weights(*steps):
        if trainer.state.global_step == 2:
            engine_server.sample = forgetful
        launch(*steps)

    trainer._loop.source._launch = lose_weights
    with pytest.raises(RolloutError, match="lost the policy's weights"):
        trainer.train()
    assert figures(trainer, "rollout/staleness_max") == [0.0, PER_BLOCK]
    assert (tmp_path / "checkpoint-4").is_dir()


@pytest.mark.long
def test_two_processes_are_the_same_too_and_talk_on_their_main_threads_alone(tmp_path):
    for rank in on_two_processes("tests.kit.overlap_run", tmp_path, "stale", "overlapped"):
        assert_equal(rank["overlapped"], rank["stale"])
        assert rank["overlapped"]["threads"] == ["MainThread"]


@pytest.mark.long
def test_two_processes_share_a_server_that_has_the_weights_of_each_blocks_beginning(tmp_path):
    for rank in on_two_processes("tests.kit.overlap_run", tmp_path, "server"):
        logged = [e for e in rank["server"]["log"] if "rollout/staleness_max" in e]
        assert [e["rollout/staleness_max"] for e in logged] == [0.0, *[PER_BLOCK] * 3]
        assert max(rank["server"]["gaps"]) < 1e-4
        assert rank["server"]["threads"] == ["MainThread"]
