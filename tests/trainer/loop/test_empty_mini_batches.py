"""Mini-batches that have nothing to teach: no weight moves, and nothing is computed."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from transformers import TrainerCallback

from tests.kit.guard_kit import build, run, same
from tests.kit.outages import build as build_asking
from tests.kit.scripted import logged, weights
from trl_stppo import PPOTrainer, STGRPOTrainer, STPPOTrainer
from trl_stppo.trainer.batch import Targets


def masked(*rollouts: int, episodes: slice = slice(None)):
    """Of these rollout batches, counted from 0, the episodes have no score."""

    def poison(trainer, due):
        original, count = trainer._rewards.score, []

        def score(*args):
            scored = original(*args)
            counts = scored.counts.clone()
            if len(count) in rollouts:
                counts[episodes] = False
            count.append(1)
            return replace(scored, counts=counts)

        trainer._rewards.score = score

    return poison


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_a_rollout_batch_that_is_masked_moves_nothing(optim, tmp_path):
    steps = {"optim": optim, "optim_args": "momentum=0.9" if optim == "sgd" else None}
    trainer, moments = run(tmp_path, masked(1), weight_decay=0.1, max_steps=9, **steps)
    after = moments.by_step
    assert any(name.count("/") == 2 for name in after[3]), "there is momentum"
    assert all(same(after[3], after[n]) for n in (4, 5, 6)), "policy, critic and moments"
    assert not any(same(after[n], after[n + 1]) for n in (1, 2, 6, 7, 8)), "all others move"
    assert logged(trainer, "guard/empty_steps") == [0, 0, 0, 1, 2, 3, 3, 3, 3]
    assert logged(trainer, "guard/skipped_steps") == [0] * 9, "they count towards no end"
    assert trainer.stop_reason is None
    rates = logged(trainer, "learning_rate")
    assert rates[4] > rates[5], "the schedule goes on"
    assert trainer.state.log_history[4]["loss"] == 0.0
    assert "policy/approx_kl" not in trainer.state.log_history[4], "nothing is computed for it"


@pytest.mark.long
def test_one_episode_is_enough_for_a_step(tmp_path):
    halves = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer, moments = run(tmp_path, masked(1, episodes=slice(1, None)), **halves)
    after = moments.by_step
    assert not any(same(after[n], after[n + 1]) for n in range(1, 6))
    assert logged(trainer, "guard/empty_steps") == [0] * 6
    _, moments = run(tmp_path / "none", masked(1), **halves)
    assert same(moments.by_step[3], moments.by_step[6]), "of all its micro-batches"


@pytest.mark.long
def test_a_resumed_run_goes_on_counting(tmp_path):
    save = {"save_strategy": "steps", "save_steps": 6, "max_steps": 9}
    whole, expected = run(tmp_path, masked(1), **save)
    trainer, moments = build(tmp_path, **save)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert same(expected.by_step[9], moments.by_step[9])
    assert logged(trainer, "guard/empty_steps") == logged(whole, "guard/empty_steps")


class Keeps(TrainerCallback):
    """The weights after each step."""

    def __init__(self, trainer):
        self.trainer, self.after = trainer, []
        trainer.add_callback(self)

    def on_step_end(self, *args, **kwargs):
        self.after.append(weights(self.trainer))


@pytest.mark.long
@pytest.mark.parametrize("trainer_class", [PPOTrainer, STPPOTrainer, STGRPOTrainer])
def test_a_batch_whose_environments_have_failed_teaches_nothing(trainer_class, tmp_path):
    options = {"num_generations": 2} if trainer_class is STGRPOTrainer else {}
    options |= {"max_steps": 5, "weight_decay": 0.1}
    down = lambda trainer, n: trainer.state.global_step == 2  # noqa: E731
    trainer = build_asking(tmp_path, down, trainer_class, **options)
    keeps = Keeps(trainer)
    trainer.train()
    assert logged(trainer, "guard/empty_steps") == [0, 0, 1, 2, 2]
    assert [same(*pair) for pair in pairwise(keeps.after)] == [False, True, True, False]


def losing(*rollouts: int):
    """Of these rollout batches no episode goes better than expected."""

    def poison(trainer, due):
        original, count = trainer._loop.targets, []

        def advantages(*args):
            targets = original(*args)
            count.append(1)
            if len(count) - 1 in rollouts:
                return Targets(**{**vars(targets), "advantages": -targets.advantages.abs()})
            return targets

        trainer._loop.targets = advantages

    return poison


WINNERS = {"variant": "st-ppo", "stabilizers": ["winners"], "weight_decay": 0.1}


def parts(before: dict, after: dict) -> tuple[bool, bool]:
    """Whether policy and critic have moved; the policy has the first two groups, with decay and without."""
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    critic = {name for name in moved if name.split("/")[0] not in ("0", "1")}
    return bool(moved - critic), bool(critic)


@pytest.mark.long
@pytest.mark.parametrize("halves", [{}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}])
def test_without_a_winner_the_critic_alone_steps(halves, tmp_path):
    trainer, moments = run(tmp_path, losing(1), max_steps=9, **WINNERS, **halves)
    after = moments.by_step
    moved = [parts(after[n], after[n + 1]) for n in range(1, 9)]
    assert moved == [(True, True)] * 2 + [(False, True)] * 3 + [(True, True)] * 3
    assert logged(trainer, "guard/empty_steps") == [0, 0, 0, 1, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("term", [{"entropy_coef": 0.1}, {"beta": 0.1}])
def test_terms_without_weights_are_a_reason_to_step(term, tmp_path):
    trainer, moments = run(tmp_path, losing(1), **WINNERS, **term)
    after = moments.by_step
    assert all(parts(after[n], after[n + 1]) == (True, True) for n in range(1, 6))
    assert logged(trainer, "guard/empty_steps") == [0] * 6
