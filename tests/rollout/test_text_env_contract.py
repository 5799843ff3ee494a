"""Which environment plays which row, and what an environment may not return."""

from __future__ import annotations

import math

import pytest
from trl_stppo.rollout.text_env import Limits, TextEnvRollout

from tests.episodes import EOS, TOKENIZER, ScriptedEnv, ScriptedModel, done, going
from trl_stppo.errors import EnvironmentContractError
from trl_stppo.rollout.chat import ChatRenderer
from trl_stppo.rollout.record import RolloutRecord

RENDERER = ChatRenderer(TOKENIZER, [EOS])
PROMPT = [{"role": "user", "content": "q"}]


def run(rollout, rows, *calls):
    return rollout.run(rows, [PROMPT] * len(rows), RENDERER, ScriptedModel(*calls), RolloutRecord())


class Kept(ScriptedEnv):
    """An environment that counts its instances."""

    made = 0

    def __init__(self, *steps, **kwargs):
        super().__init__(*steps, **kwargs)
        type(self).made += 1


class Other(Kept):
    made = 0


@pytest.fixture(autouse=True)
def _count_afresh():
    Kept.made = Other.made = 0


def test_instances_are_kept_and_reset():
    rollout = TextEnvRollout({None: lambda: Kept(done())}, Limits(None, None, 50))
    for rows in ([{"n": 1}, {"n": 2}], [{"n": 3}], [{"n": 4}, {"n": 5}, {"n": 6}]):
        run(rollout, rows, ["a]"] * len(rows))
    assert Kept.made == 3


def test_the_environment_column_chooses_and_does_not_reach_reset():
    made = {}

    def factory(name, cls):
        def make():
            made[name] = cls(done())
            return made[name]

        return make

    factories = {"kept": factory("kept", Kept), "other": factory("other", Other)}
    rows = [{"environment": "other", "n": 1}, {"environment": "kept", "n": 2}]
    run(TextEnvRollout(factories, Limits(None, None, 50)), rows, ["a]", "b]"])
    assert made["other"].rows == [{"n": 1}]
    assert made["kept"].rows == [{"n": 2}]


def test_a_single_environment_sees_an_environment_column_as_data():
    env = ScriptedEnv(done())
    rollout = TextEnvRollout({None: lambda: env}, Limits(None, None, 50))
    run(rollout, [{"environment": "north"}], ["a]"])
    assert env.rows == [{"environment": "north"}]


@pytest.mark.parametrize("row", [{"environment": "unknown"}, {}])
def test_a_row_that_names_no_known_environment_is_refused(row):
    rollout = TextEnvRollout({"known": lambda: ScriptedEnv(done())}, Limits(None, None, 50))
    with pytest.raises(ValueError, match=r"`environment=.*allowed are \['known'\]"):
        run(rollout, [row])


@pytest.mark.parametrize("opening", [3, ["hi"], ("hi",), ("hi", {}, 1), (3, {})])
def test_reset_must_return_text(opening):
    rollout = TextEnvRollout(
        {None: lambda: ScriptedEnv(done(), opening=opening)}, Limits(None, None, 50)
    )
    with pytest.raises(EnvironmentContractError, match=r"ScriptedEnv\.reset returned"):
        run(rollout, [{}])


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("done", "ScriptedEnv.step returned 'done'; allowed is"),
        (("x", 1.0, True, {}), "ScriptedEnv.step returned"),
        (["x", 1.0, True, False, {}], "ScriptedEnv.step returned"),
        (None, "ScriptedEnv.step returned None"),
        ((3, 1.0, False, False, {}), "returned a int observation and a dict info"),
        (("x", 1.0, False, False, None), "returned a str observation and a NoneType info"),
    ],
)
def test_step_must_return_five_things_of_the_right_types(result, message):
    rollout = TextEnvRollout({None: lambda: ScriptedEnv(result)}, Limits(None, None, 50))
    with pytest.raises(EnvironmentContractError, match=message):
        run(rollout, [{}], ["a]"])


@pytest.mark.parametrize("reward", [math.nan, math.inf, None, "1"])
def test_a_reward_that_is_no_finite_number_is_refused(reward):
    rollout = TextEnvRollout({None: lambda: ScriptedEnv(going("", reward))}, Limits(None, None, 50))
    with pytest.raises(ValueError, match=r"`ScriptedEnv\.step reward` is"):
        run(rollout, [{}], ["a]"])


def test_a_contract_error_is_a_type_error():
    assert issubclass(EnvironmentContractError, TypeError)
