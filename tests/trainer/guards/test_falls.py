"""The alarm of a run that loses what it had, and the best checkpoint of its training."""

import json
import logging

import pytest
import torch

from tests.kit import outages
from tests.kit.scripted import assert_same_run, logged, weights
from trl_stppo import STPPOTrainer
from trl_stppo.trainer.guards.alarms import FallWatch

EPISODES = 128


def alarms(levels, kls=None, name="episode/success_rate", **figures) -> list[int]:
    """Numbers of the rollouts that raise an alarm."""
    watch, found = FallWatch(EPISODES), []
    for n, level in enumerate(levels):
        kl = None if n == 0 else (kls or [0.004] * len(levels))[n - 1]
        if watch.look({name: level, **figures}, kl, 8 * n):
            found.append(n)
    assert watch.falls == len(found)
    return found


RISE = [0.4, 0.7, 0.9, 0.97, 0.97]


@pytest.mark.parametrize(("levels", "expected"), [
    ([*RISE, 0.54, 0.52, 0.6], [5]),
    ([*RISE, 0.54, 0.97, 0.5], [5, 7]),
    ([*RISE, 0.9, 0.82, 0.84], []),
    ([*RISE, 0.7, 0.69], [5]),
    ([*RISE, 0.87, 0.73], [6]),
    ([0.03, 0.05, 0.04, 0.01, 0.02], []),
    ([0.9, 0.3], []),
    ([0.5, 0.4, None, 0.6, 0.5, 0.1], [5]),
])  # fmt: skip
def test_success_falls(levels, expected):
    assert alarms([torch.nan if x is None else x for x in levels]) == expected


def test_a_watch_goes_on_from_its_state():
    levels = [*RISE, 0.97, 0.5, 0.5, 0.97, 0.4]
    whole = FallWatch(EPISODES)
    expected = [whole.look({"episode/success_rate": x}, 0.01, n) for n, x in enumerate(levels)]
    watch, found = FallWatch(EPISODES), []
    for n, level in enumerate(levels):
        state = json.loads(json.dumps(watch.state_dict()))
        watch = FallWatch(EPISODES, **state)
        found.append(watch.look({"episode/success_rate": level}, 0.01, n))
    assert found == expected
    assert watch.good_step == whole.good_step == 8


class Told(outages.Asking):
    """Succeeds as often as the rollout's number says."""

    def __init__(self, plan) -> None:
        super().__init__(lambda n: False)
        self._plan = plan

    def step(self, action):
        observation, reward, done, truncated, info = super().step(action)
        if done:
            info["success"] = self._n % outages.BATCH < self._plan()
        return observation, reward, done, truncated, info


def build(folder, plan, trainer_class=STPPOTrainer, **options):
    """A trainer of whose 8 episodes so many succeed in each rollout, of two optimizer steps each."""
    holder = []

    def due() -> int:
        return plan[min(holder[0].state.global_step // 2, len(plan) - 1)]

    arguments = {"environment_factory": lambda: Told(due)}
    options = {"max_steps": 2 * len(plan), "rows": outages.BATCH, **options}
    trainer = outages.build(folder, trainer_class=trainer_class, arguments=arguments, **options)
    holder.append(trainer)
    return trainer


@pytest.mark.long
def test_a_fall_is_told_once_with_the_checkpoint_before_it(tmp_path, caplog):
    save = {"save_strategy": "steps", "save_steps": 3}
    trainer = build(tmp_path, [8, 8, 8, 8, 0, 0], **save)
    with caplog.at_level(logging.WARNING, "trl_stppo"):
        trainer.train()
    lines = [r.getMessage() for r in caplog.records if "Last checkpoint before the fall" in r.message]
    assert len(lines) == 1
    assert f"{tmp_path}/checkpoint-6." in lines[0], "the policy of step 6 played the last good rollout"
    assert logged(trainer, "guard/falls") == [0] * 8 + [1] * 4


@pytest.mark.long
def test_the_best_checkpoint_stays_and_is_the_policy_that_played_it(tmp_path):
    class Watched(STPPOTrainer):
        seen = ()

        def _generate_and_score_completions(self, inputs):
            if self.model.training:
                self.seen = (*self.seen, weights(self))
            return super()._generate_and_score_completions(inputs)

    plan = [2, 4, 6, 5, 3, 3]
    options = {"save_best": True, "save_strategy": "steps", "save_steps": 5, "save_total_limit": 1}
    trainer = build(tmp_path, plan, Watched, **options)
    trainer.train()
    assert outages.saved(tmp_path) == ["checkpoint-12", "checkpoint-4"]
    again = build(tmp_path, plan, **options)
    again._load_from_checkpoint(str(tmp_path / "checkpoint-4"))
    best, loaded = trainer.seen[2], weights(again)
    assert all(torch.equal(best[n], loaded[n]) for n in best)
    assert any(not torch.equal(trainer.seen[3][n], loaded[n]) for n in best)


@pytest.mark.long
def test_saving_the_best_changes_nothing_and_a_run_goes_on_from_it(tmp_path):
    plan = [2, 4, 6, 5, 7, 3]
    plain = build(tmp_path / "plain", plan)
    plain.train()
    options = {"save_best": True, "save_strategy": "steps", "save_steps": 100}
    trainer = build(tmp_path / "best", plan, **options)
    trainer.train()
    assert outages.saved(tmp_path / "best") == [f"checkpoint-{n}" for n in (12, 2, 4, 8)]
    resumed = build(tmp_path / "best", plan, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "best/checkpoint-4"))
    for other in (trainer, resumed):
        assert_same_run(other, plain)


@pytest.mark.long
def test_the_best_checkpoint_survives_a_resume(tmp_path):
    plan = [2, 6, 5, 4, 3, 3]
    options = {"save_best": True, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    build(tmp_path, plan, max_steps=6, **options).train()
    trainer = build(tmp_path, plan, **options)
    trainer.train(resume_from_checkpoint=True)
    assert outages.saved(tmp_path) == ["checkpoint-12", "checkpoint-2"]
