"""Each check of `check_env` finds its fault, and a clean environment passes without a word."""

import asyncio
import signal
import sqlite3
from decimal import Decimal

import numpy as np
import pytest
import torch

from tests.kit.check_env_cases import (
    ONE,
    Clean,
    CleanAsync,
    CleanTools,
    env_with,
    returning,
    smell,
)
from trl_stppo.envs import check_env
from trl_stppo.errors import EnvironmentContractError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("env", [Clean, CleanAsync])
@pytest.mark.parametrize("make", [lambda env: env, lambda env: env()])
def test_clean_text_environments_pass(env, make, recwarn) -> None:
    assert check_env(make(env)) == []
    assert len(recwarn) == 0


REWARDS = ["1", None, float("nan"), 1j, [1.0], np.ones(2)]
NUMBERS = [True, np.float64(1), torch.tensor(0.5), Decimal(1)]


@pytest.mark.parametrize(("faulty", "message"), [
    *((returning(reward, at=1), r"Faulty\.step returned the reward") for reward in REWARDS),
    (returning(b"x", at=0), "step returned the observation"),
    (returning([], at=4), "step returned the info"),
    (returning(("x", 0.0, False)), "step returned a tuple of 3"),
    *((returning(flag, at=2), "step returned terminated = ") for flag in ("False", None, {})),
    (returning("no", at=3), "step returned truncated = 'no'"),
    (returning({"success": "lost"}, at=4), r"step returned info\['success'\] = 'lost'"),
    (lambda self: None, r"step\('hello'\) raised TypeError"),
    (lambda self, action: int(action), r"\.step\('hello'\) raised ValueError: .*test_check_env\.py:\d+\)"),
    (lambda self, action: asyncio.sleep(0), "step returned NoneType"),
])  # fmt: skip
def test_faulty_steps(faulty, message) -> None:
    with pytest.raises(EnvironmentContractError, match=message):
        check_env(env_with(step=faulty))


@pytest.mark.parametrize(
    ("value", "at"),
    [*((reward, 1) for reward in NUMBERS), (np.False_, 3), (torch.tensor(False), 3)],
)
def test_whatever_is_a_number_is_a_reward_and_a_bool_a_flag(value, at) -> None:
    assert check_env(env_with(step=returning(value, at=at))()) == []


@pytest.mark.parametrize(("faulty", "message"), [
    (lambda self, task, **row: "x", "reset.* raised TypeError: .*'task'"),
    (lambda self, **row: 3, "reset returned 3"),
    (lambda self, **row: row["answers"], r"reset\(.* raised KeyError: 'answers'"),
    (lambda self, **row: asyncio.sleep(0, 3), "reset returned 3"),
])  # fmt: skip
def test_faulty_resets(faulty, message) -> None:
    with pytest.raises(EnvironmentContractError, match=message):
        check_env(env_with(reset=faulty))


def test_rows_without_a_prompt_are_a_smell() -> None:
    found = check_env(Clean, [{"seed": 1, "question": "why?"}])
    assert len(found) == 1
    assert "`rows` has the columns ['seed', 'question'] and no `prompt`" in found[0]


@pytest.mark.parametrize("key", ["valid_action", "success"])
def test_missing_information_is_a_smell(key) -> None:
    def step(self, action):
        result = Clean.step(self, action)
        result[4].pop(key, None)
        return result

    assert f"info['{key}']" in smell(env_with(step=step)())


def test_state_of_the_old_episode_in_the_opening_is_a_smell() -> None:
    class Counting(Clean):
        episodes = 0

        def reset(self, **row):
            self.episodes += 1
            return f"{super().reset()[0]} {self.episodes}", {}

    assert "reset returns another text" in smell(Counting())


def test_state_on_the_class_is_shared() -> None:
    class Shared(Clean):
        position: dict[str, int] = {}  # noqa: RUF012

        def reset(self, **row):
            self.position["turn"] = 0
            return "x"

        def step(self, action):
            self.turn = self.position["turn"] = self.position["turn"] + 1
            return f"{self.turn}", 0.0, False, False, {"valid_action": True}

    assert check_env(Shared()) == []
    with pytest.raises(EnvironmentContractError, match="Two instances of Shared"):
        check_env(Shared)


def test_rows_reach_the_instances() -> None:
    class Shared(Clean):
        def reset(self, **row):
            Shared.task = row["task"]
            super().reset()
            return "x"

        def step(self, action):
            _, *rest = super().step(action)
            return Shared.task, *rest

    check_env(Shared, [{"task": "a"}])
    with pytest.raises(EnvironmentContractError, match="Two instances of"):
        check_env(Shared, [{"task": "a"}, {"task": "b"}])


def test_only_the_first_rows_are_played() -> None:
    seen: list[int] = []

    class Seeing(Clean):
        def reset(self, **row):
            seen.append(row["n"])
            return super().reset()

    check_env(Seeing, ({"n": n} for n in range(100)))
    assert max(seen) == 7
    with pytest.raises(ValueError, match="`rows` is empty"):
        check_env(Seeing, [])


@pytest.mark.parametrize(("factory", "message"), [
    (3, "The factory raised TypeError"),
    (lambda: 3, "int has no method `reset`"),
    (lambda: 1 / 0, "The factory raised ZeroDivisionError"),
    (lambda: ONE, "The factory returned the same Clean twice"),
    (env_with(close=None), r"close\(\) raised TypeError"),
    (env_with(close=lambda self: 1 / 0), r"close\(\) raised ZeroDivisionError"),
    (env_with(close=lambda self, code: None), r"close\(\) raised TypeError"),
])  # fmt: skip
def test_faulty_factories(factory, message) -> None:
    with pytest.raises(EnvironmentContractError, match=message):
        check_env(factory)


def test_what_was_made_is_closed_and_an_instance_of_the_caller_is_not() -> None:
    class Closing(Clean):
        opened = closed = 0

        def __init__(self) -> None:
            Closing.opened += 1

        def close(self) -> None:
            Closing.closed += 1

    check_env(Closing())
    assert (Closing.opened, Closing.closed) == (1, 0)
    check_env(Closing)
    assert Closing.opened - 1 == Closing.closed > 1


def asking_a_database(**options):
    """Clean, with a database that reset opens and step reads."""

    def reset(self, **row):
        self.database = sqlite3.connect(":memory:", **options)
        return Clean.reset(self, **row)

    def step(self, action):
        self.database.execute("select 1")
        return Clean.step(self, action)

    return env_with(Clean, reset=reset, step=step)


def test_calls_come_from_different_threads_as_in_a_training() -> None:
    with pytest.raises(EnvironmentContractError) as caught:
        check_env(asking_a_database())
    assert "check_same_thread=False" in str(caught.value)
    assert "isolated(" in str(caught.value)
    assert check_env(asking_a_database(check_same_thread=False)()) == []


def test_a_tool_that_needs_the_main_thread_gets_it_and_a_step_does_not() -> None:
    def look(self, where: str) -> str:
        """Look.\n\nArgs:\n    where: the place."""
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return where

    assert check_env(env_with(CleanTools, look=look)(), actions=[("look", {"where": "x"})]) == []

    def step(self, action):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return Clean.step(self, action)

    with pytest.raises(EnvironmentContractError, match="isolated"):
        check_env(env_with(Clean, step=step))
