"""Runs in which nothing can be played end at the start, or after the first rollout batch, with the cause."""

import functools

import pytest

from tests.kit.builders import LIMITS, build, prompts
from tests.kit.fakes import CountEnv
from tests.kit.tiers import quick
from trl_stppo.errors import EnvironmentContractError, EnvironmentFailureError


class Secret(CountEnv):
    def reset(self, secret: str, **row):
        return super().reset(**row)


class Broken(CountEnv):
    """Fails in the way that `kind` names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def reset(self, **row):
        return row["start"] if self.kind == "row" else super().reset(**row)

    def step(self, action):
        observation, reward, *rest = super().step(action)
        if self.kind == "reward":
            return observation, "one", *rest
        return (3, reward, *rest) if self.kind == "observation" else (observation, reward, *rest)


def test_a_column_that_reset_needs_is_missed_at_the_start(tmp_path):
    with pytest.raises(EnvironmentContractError, match=r"`Secret.reset` needs `secret`") as caught:
        build(tmp_path, arguments={"environment_factory": Secret}, **LIMITS)
    assert "`train_dataset`" in str(caught.value)
    rows = prompts(secret=["x"] * 8)
    build(tmp_path, arguments={"environment_factory": Secret, "train_dataset": rows}, **LIMITS)


def test_named_environments_are_each_looked_at_without_the_column_that_names_them(tmp_path):
    class Named(CountEnv):
        def reset(self, environment, **row):
            return super().reset(**row)

    factories = {"one": CountEnv, "two": Named}
    rows = prompts(environment=["one", "two"] * 4)
    with pytest.raises(EnvironmentContractError, match=r"`Named.reset` needs `environment`"):
        build(tmp_path, arguments={"environment_factory": factories, "train_dataset": rows}, **LIMITS)


@pytest.mark.parametrize("kind", quick(["row", "reward", "observation"], "row", "reward"))
def test_a_first_batch_in_which_every_episode_fails_ends_the_run(kind, tmp_path, capsys):
    given = {"environment_factory": functools.partial(Broken, kind)}
    trainer = build(tmp_path, arguments=given, max_steps=8, **LIMITS)
    with pytest.raises(EnvironmentFailureError) as caught:
        trainer.train()
    cause = {"row": "KeyError: 'start'", "reward": "reward 'one'", "observation": "observation 3"}
    for part in ("8 of 8", "first rollout batch", cause[kind], "columns prompt", "env check"):
        assert part in str(caught.value)
    assert trainer.state.global_step == 0
    assert "all episodes score" not in capsys.readouterr().out
