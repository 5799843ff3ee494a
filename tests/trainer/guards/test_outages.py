"""Runs whose environments fail: they end with a checkpoint of the run as it stood before."""

from itertools import pairwise

import pytest
import torch
from datasets import IterableDataset
from transformers import TrainerCallback

from tests.kit.builders import prompts
from tests.kit.guard_kit import same
from tests.kit.launch import by_case
from tests.kit.outages import BATCH, build, saved
from tests.kit.outages_run import CASES as ON_TWO
from tests.kit.scripted import assert_same_run, weights
from tests.kit.tiers import quick
from trl_stppo.errors import EnvironmentFailureError
from trl_stppo.rollout import engine

# Two rollout batches are an epoch; batch n begins after step 2 n.
CASES = {
    "amid an epoch": (6, {}),
    "at its start": (4, {}),
    "played by an older policy": (6, {"rollout_staleness": 1}),
}


@pytest.fixture
def impatient(monkeypatch):
    """A whole batch of failures is enough."""
    monkeypatch.setattr(engine, "MAX_FAILURES_IN_A_ROW", BATCH)


@pytest.fixture(scope="module", params=quick(CASES, "amid an epoch", "played by an older policy"))
def uninterrupted(request, tmp_path_factory):
    at, options = CASES[request.param]
    trainer = build(tmp_path_factory.mktemp("whole"), **options)
    before = weights(trainer)
    trainer.train()
    assert not same(weights(trainer), before), "there is something to learn"
    return at, options, trainer


@pytest.mark.long
def test_a_rollout_without_environments_is_played_again(uninterrupted, impatient, tmp_path):
    at, options, expected = uninterrupted
    trainer = build(tmp_path, lambda trainer, n: trainer.state.global_step == at, **options)
    with pytest.raises(EnvironmentFailureError) as caught:
        trainer.train()
    for part in (
        f"The last {BATCH} episodes all ended in a failure",
        "ConnectionError: no server",
        f"after step {at}",
        str(tmp_path / f"checkpoint-{at}"),
        "the checkpoint before it: none",
    ):
        assert part in str(caught.value)
    assert trainer.stop_reason.startswith("The last 8 episodes")
    assert saved(tmp_path) == [f"checkpoint-{at}"]

    resumed = build(tmp_path, **options)
    resumed.train(resume_from_checkpoint=True)
    assert_same_run(resumed, expected)


class Saves(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_save(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)


class OwnError(Exception):
    """Of a user's library; its arguments are its own."""

    def __init__(self, code, *, text):
        super().__init__(text)


@pytest.mark.long
def test_any_error_of_a_rollout_saves_first(tmp_path, caplog):
    def judged(breaks):
        def judge(completions, trainer_state, **kwargs):
            if breaks and trainer_state.global_step == 6:
                torch.rand(3)
                raise OwnError(5, text="the judge is asleep")
            return [float(len(messages)) for messages in completions]

        return {"reward_funcs": [judge]}

    trainer = build(tmp_path, arguments=judged(True))
    with pytest.raises(OwnError, match="asleep"):
        trainer.train()
    assert saved(tmp_path) == ["checkpoint-6"]
    assert trainer.stop_reason == "the judge is asleep"
    assert str(tmp_path / "checkpoint-6") in caplog.text
    resumed = build(tmp_path, arguments=judged(False))
    resumed.train(resume_from_checkpoint=True)
    expected = build(tmp_path / "whole", arguments=judged(False))
    expected.train()
    assert_same_run(resumed, expected)


@pytest.mark.long
def test_a_bad_row_of_a_stream_saves_first(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "say a "}], "n": n} for n in range(40)]
    rows[30]["prompt"] = [{"role": "user", "content": None}]
    stream = IterableDataset.from_generator(lambda: iter(rows))
    trainer = build(tmp_path, arguments={"train_dataset": stream}, shuffle_dataset=False)
    with pytest.raises(ValueError, match="`prompt`"):
        trainer.train()
    assert saved(tmp_path) == ["checkpoint-6"]


@pytest.mark.long
def test_what_is_saved_already_is_not_saved_again(impatient, tmp_path):
    saves = Saves()
    trainer = build(
        tmp_path, lambda trainer, n: trainer.state.global_step == 4,
        arguments={"callbacks": [saves]}, save_strategy="steps", save_steps=2,
    )  # fmt: skip
    with pytest.raises(EnvironmentFailureError, match=r"checkpoint-4 \(.*before it: .*point-2\)"):
        trainer.train()
    assert saves.steps == [2, 4]


def test_before_the_first_step_there_is_nothing_to_save(impatient, tmp_path):
    trainer = build(tmp_path, lambda trainer, n: True)
    with pytest.raises(EnvironmentFailureError, match="Nothing was saved"):
        trainer.train()
    assert not saved(tmp_path)
    with pytest.raises(EnvironmentFailureError, match=r"env check`\.$"):
        trainer.evaluate(prompts(BATCH, n=list(range(BATCH))))


@pytest.mark.long
def test_an_evaluation_that_fails_comes_after_the_checkpoint_that_is_due(impatient, tmp_path):
    def evaluated(trainer, n):
        return trainer._evaluator.run is not None

    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": BATCH}
    save = {"save_strategy": "steps", "save_steps": 2}
    rows = {"arguments": {"eval_dataset": prompts(BATCH, n=list(range(BATCH)))}}
    trainer = build(tmp_path, evaluated, **evaluation, **save, **rows)
    with pytest.raises(EnvironmentFailureError, match="checkpoint-2"):
        trainer.train()
    assert saved(tmp_path) == ["checkpoint-2"]
    resumed, expected = build(tmp_path), build(tmp_path / "whole")
    expected.train()
    resumed.train(resume_from_checkpoint=True)
    assert same(weights(resumed), weights(expected))


def some(count: int, since: int = 0, until: int = 99):
    """So many episodes of each batch fail, from step `since` on."""
    return lambda trainer, n: n % BATCH < count and since <= trainer.state.global_step < until


# Of rows that are not shuffled each batch holds all remainders.
STEADY = {"shuffle_dataset": False, "max_steps": 14}


RATES = [
    # The fifth batch is played after step 8; before it nothing ends.
    (some(5), 8),
    # Half of the episodes are not more than half.
    (some(4), None),
    # First 2 of 5 batches fail, then 3 of the last 5; 3 of 6 are half.
    (some(8, since=6), 10),
]


@pytest.mark.long
@pytest.mark.parametrize(("down", "end"), quick(RATES, RATES[2]))
def test_too_many_failures_of_five_batches_end_the_run(down, end, tmp_path):
    trainer = build(tmp_path, down, **STEADY)
    if end is None:
        trainer.train()
        assert trainer.state.global_step == 14
        assert not saved(tmp_path)
        return
    with pytest.raises(EnvironmentFailureError) as caught:
        trainer.train()
    failed = 25 if end == 8 else 24
    for part in (
        f"{failed} of 40 episodes of the last 5 rollout batches ({failed / 40:.0%})",
        "ConnectionError: no server (",
        f" ({failed}x)",
        str(tmp_path / f"checkpoint-{end}"),
    ):
        assert part in str(caught.value)
    assert saved(tmp_path) == [f"checkpoint-{end}"]


@pytest.mark.long
def test_the_count_goes_on_over_a_resume_and_begins_anew_after_the_end(tmp_path):
    save = {"save_strategy": "steps", "save_steps": 6}
    build(tmp_path, some(7), **{**STEADY, "max_steps": 6}, **save).train()
    trainer = build(tmp_path, some(7), **STEADY)
    with pytest.raises(EnvironmentFailureError, match="35 of 40 episodes"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 8
    healed = build(tmp_path, **STEADY)
    healed.train(resume_from_checkpoint=True)
    assert healed.state.global_step == 14


# Two processes, of which one alone fails or can learn.
NOTHING = "rank 1 has nothing to learn from"
RAISED = "an error of rank 1 alone"
NOW = ("all of rank 1 fail at once", "all of rank 1 fail, too many", RAISED, NOTHING)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of both ranks, of a case."""
    return by_case("tests.kit.outages_run", ON_TWO, NOW, tmp_path_factory, timeout=300)


ENDS = {
    "all of rank 1 fail at once": (4, "EnvironmentFailureError: The last 8 episodes all"),
    # All 40 of rank 1, and every eighth row of rank 0.
    "all of rank 1 fail, too many": (8, "EnvironmentFailureError: 44 of 80 episodes"),
    RAISED: (4, "RolloutError: ValueError: no rows"),
    "weights of rank 1": (4, "NonFiniteError: Weights are not finite after step 4"),
}


@pytest.mark.long
@pytest.mark.parametrize("case", quick(ENDS, *NOW[:3]))
def test_both_end_with_the_same_message(case, ranks):
    step, message = ENDS[case]
    for rank in ranks(case):
        assert rank["error"].startswith(message)
        assert rank["steps"] == step
        kept = [] if case.startswith("weights") else [f"checkpoint-{step}"]
        assert rank["checkpoints"] == kept


@pytest.mark.slow
def test_failures_are_counted_over_all_processes(ranks):
    for result in ranks("all of rank 1 fail, allowed"):
        assert (result["error"], result["steps"], result["empty"]) == (None, 12, [0] * 12)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "moves"),
    quick([(NOTHING, True), ("nobody has anything to learn from", False)], (NOTHING, True)),
)
def test_a_step_is_taken_where_anybody_has_something_to_learn_from(case, moves, ranks):
    for result in ranks(case):
        moved = [not same(*pair) for pair in pairwise(result["after"])]
        assert moved == [True, moves, moves]
        assert result["empty"] == ([0, 0, 0, 0] if moves else [0, 0, 1, 2])
