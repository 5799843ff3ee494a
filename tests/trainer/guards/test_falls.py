"""The alarm of a run that loses what it had."""

import json
import logging
import math

import pytest

from tests.kit import outages
from tests.kit.scripted import logged
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
    assert alarms([math.nan if x is None else x for x in levels]) == expected


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
