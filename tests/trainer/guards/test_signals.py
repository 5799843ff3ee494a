"""SIGTERM and SIGINT end a run with a checkpoint; two processes agree on that, and on what to skip."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.kit import warm
from tests.kit.builders import LIMITS, at_step, build, prompts
from tests.kit.fakes import CountEnv
from tests.kit.guards_run import CASES
from tests.kit.launch import ENVIRONMENT, ROOT, by_case
from tests.kit.scripted import (
    Float64Trainer,
    assert_same_weights,
    numbered_rows,
    scripted_trainer,
    train,
    weights,
)
from tests.kit.signals_run import RUN
from tests.kit.tiers import quick
from tests.kit.waiting import PATIENCE

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def sends(event, step, number):
    """Signals to this very process, at one event of one step."""
    return at_step(event, step, lambda: os.kill(os.getpid(), number))


@pytest.fixture(autouse=True)
def _interruptible():
    """What a shell starts in the background ignores interrupts from the beginning."""
    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, kept)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    trainer, _ = train(tmp_path_factory.mktemp("whole"), **RUN)
    return weights(trainer)


# An update has three steps; a rollout begins after each third step.
MOMENTS = [
    (signal.SIGTERM, "on_step_begin", 1, 3),
    (signal.SIGINT, "on_step_begin", 3, 3),
    (signal.SIGTERM, "on_pre_optimizer_step", 4, 6),
    (signal.SIGINT, "on_save", 3, 3),
]


@pytest.mark.long
@pytest.mark.parametrize(("number", "event", "at", "stops"), quick(MOMENTS, MOMENTS[1], MOMENTS[2]))
def test_a_signal_ends_the_run_between_rollouts_and_it_can_go_on_exactly(
    number, event, at, stops, tmp_path, uninterrupted, capfd
):
    save = {"save_strategy": "steps", "save_steps": 2}
    before = [signal.getsignal(n) for n in SIGNALS]
    trainer, _ = train(tmp_path, callbacks=[sends(event, at, number)], **RUN, **save)
    assert [signal.getsignal(n) for n in SIGNALS] == before, "the handlers are given back"
    assert trainer.state.global_step == stops
    assert trainer.stop_signal == number
    assert trainer.stop_reason == f"signal {number.name}"
    assert (tmp_path / f"checkpoint-{stops}").is_dir()
    assert f"{number.name} received" in capfd.readouterr().err
    resumed, _ = scripted_trainer(tmp_path, **RUN)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.stop_signal is None
    final = weights(resumed)
    assert all(torch.equal(final[name], tensor) for name, tensor in uninterrupted.items())


class Slow(CountEnv):
    """Sends a signal in the second rollout, then blocks for a minute."""

    steps = 0

    def step(self, action):
        type(self).steps += 1
        if type(self).steps == 32 + 5:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return super().step(action)


@pytest.mark.long
def test_a_signal_abandons_a_rollout_at_once(tmp_path):
    options = {"num_ppo_epochs": 2, "max_steps": 8, "per_device_train_batch_size": 8}
    given = {"environment_factory": CountEnv, "train_dataset": prompts(8)}
    whole = build(tmp_path / "whole", arguments=given, **LIMITS, **options)
    whole.train()
    given["environment_factory"] = Slow
    ended = build(tmp_path / "ended", arguments=given, **LIMITS, **options)
    began = time.monotonic()
    ended.train()
    assert time.monotonic() - began < 40
    assert (ended.state.global_step, ended.stop_reason) == (4, "signal SIGTERM")
    resumed = build(tmp_path / "ended", arguments=given, **LIMITS, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "ended" / "checkpoint-4"))
    assert_same_weights(resumed, whole)
    # The trainer that was stopped plays on, too.
    assert len(ended._player.play([{"prompt": "a"}], (1, 2), training=True).episodes) == 1


@pytest.mark.long
def test_a_second_signal_ends_the_update_after_its_step(tmp_path):
    callbacks = [sends("on_pre_optimizer_step", 4, signal.SIGTERM)]
    callbacks += [sends("on_optimizer_step", 4, signal.SIGINT)]
    trainer, _ = train(tmp_path, callbacks=callbacks, **{**RUN, "num_ppo_epochs": 4})
    assert (trainer.state.global_step, trainer.stop_reason) == (5, "signal SIGTERM")
    assert (tmp_path / "checkpoint-5").is_dir()
    resumed, _ = scripted_trainer(tmp_path, **{**RUN, "num_ppo_epochs": 4})
    played, rollout = [], resumed._loop.rollout
    resumed._loop.rollout = lambda rows: played.append(resumed.state.global_step) or rollout(rows)
    resumed.train(resume_from_checkpoint=True)
    assert played == [5], "the update's rest is dropped"
    assert resumed.state.global_step == 7


@pytest.mark.long
def test_an_evaluation_that_is_due_is_left_out_and_one_that_runs_is_the_end(tmp_path):
    options = {
        **RUN, "eval_dataset": numbered_rows(), "per_device_eval_batch_size": 8,
        "eval_strategy": "steps", "eval_steps": 2,
    }  # fmt: skip
    due, _ = train(tmp_path / "due", callbacks=[sends("on_pre_optimizer_step", 1, signal.SIGTERM)], **options)
    assert due.state.global_step == 3
    assert not any(n.startswith("eval_") for entry in due.state.log_history for n in entry)

    class Evaluates(Float64Trainer):
        def evaluate(self, *args, **kwargs):
            os.kill(os.getpid(), signal.SIGTERM)
            return super().evaluate(*args, **kwargs)

    during, _ = train(tmp_path / "during", **{**options, "trainer_class": Evaluates})
    assert during.state.global_step == 3
    assert (tmp_path / "during" / "checkpoint-3").is_dir()


@pytest.mark.long
def test_a_process_that_is_told_to_end_returns_from_train_and_exits_in_order(tmp_path):
    process = warm.Process(
        [sys.executable, "-m", "tests.kit.signals_run", str(tmp_path)], cwd=ROOT,
        env={**os.environ, **ENVIRONMENT}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in process.stdout:
        if line.startswith("BEGIN 2"):
            process.send_signal(signal.SIGTERM)
            break
    output, errors = process.communicate("go on\n", timeout=2 * PATIENCE)
    assert process.returncode == 0, errors[-2000:]
    assert "RETURNED 3 15" in output
    assert "BEGIN 4" not in output
    assert "SIGTERM received" in errors
    last = errors.strip().splitlines()[-1]
    assert last.startswith("Training stopped after step 3 of 7: signal SIGTERM. ")
    assert (tmp_path / "checkpoint-3").is_dir()


# All others are for the long tests alone.
NOW = (
    "signal to rank 1",
    "signal to rank 1 in a rollout",
    "signal to rank 1 at an update's end",
    "rank 0 never finite",
    "the folder of another run",
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of both ranks, of a case."""
    return by_case("tests.kit.guards_run", CASES, NOW, tmp_path_factory)


def moved(result: dict, step: int) -> bool:
    before, after = result["weights"][step - 1], result["weights"][step]
    return any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_both_processes_come_to_the_same_end(case, ranks):
    one, two = ranks(case)
    for name in ("skipped_steps", "stop_reason", "stop_signal", "error"):
        if name != "stop_signal" or one[name] is not None:
            assert one[name] == two[name], name
    assert len(one["weights"]) == len(two["weights"])
    last = one["weights"][-1]
    assert all(torch.equal(last[name], two["weights"][-1][name]) for name in last)


@pytest.mark.long
@pytest.mark.parametrize(("case", "what"), [
    # DDP has spread the one process's gradient to both, before any of them could look.
    ("loss of rank 1", "the loss (process 1), the policy's gradient (processes 0, 1)"),
    ("critic of rank 1", "the critic's gradient (process 1)"),
])  # fmt: skip
def test_both_skip_what_is_not_finite_on_one_and_tell_which(case, what, ranks):
    for result in ranks(case):
        assert [moved(result, step) for step in (1, 2, 3, 4)] == [True, False, True, True]
        assert result["skipped_steps"] == [0, 1, 1, 1]
        assert result["what"] == what, "each knows whose it was"


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("signal")])
def test_a_signal_to_one_stops_both_after_the_same_step(case, ranks):
    for result in ranks(case):
        assert len(result["weights"]) == 1 + 2
        assert result["stop_reason"] == "signal SIGTERM"
        assert result["stop_signal"] == signal.SIGTERM
        assert result["checkpoints"] == ["checkpoint-2"]


def test_both_raise_once_the_checkpoint_is_there(ranks):
    for result in ranks("rank 0 never finite"):
        assert "was not finite at step 3" in result["error"]
        assert result["checkpoints"] == ["checkpoint-3"]


def test_both_hear_of_another_run_in_their_folder(ranks):
    """Only the first of them looks, and the other does not wait for it."""
    for result in ranks("the folder of another run"):
        assert "belongs to another run (host" in result["error"]
