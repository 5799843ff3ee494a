"""Reading actions, and Gymnasium's toy-text games where the package is installed."""

import functools
import random
import sys
from types import SimpleNamespace

import pytest

from trl_stppo.envs import check_env
from trl_stppo.envs.adapters import GemEnv, GymnasiumEnv
from trl_stppo.envs.adapters.gem import PrivateRandomness
from trl_stppo.envs.adapters.gymnasium import action_text, last_word


@pytest.mark.parametrize(("text", "word"), [
    ("left", "left"),
    ("I go LEFT.", "left"),
    ("not left but right", "right"),
    ("<action>up</action> because left is a hole", "up"),
    ("<action>up</action><action> down </action>", "down"),
    ("<action>left, then right</action>", "right"),
    ("<action></action> left", None),
    ("<action>upwards</action>", None),
    ("", None),
    ("pick up", "pick up"),
    ("leftright", None),
    ("go up", "go up"),
    ("go", "go"),
    ("go Back", "Back"),
    ("STRASSE", "straße"),
    ("I say +", "+"),
    ("1 + -", "-"),
])  # fmt: skip
def test_last_word(text: str, word: str | None) -> None:
    assert (
        last_word(
            text,
            ["left", "right", "up", "down", "pick up", "go", "go up", "Back", "straße", "+", "-"],
        )
        == word
    )


def test_action_text_is_the_last_tag_or_everything() -> None:
    assert action_text(" go north ") == "go north"
    assert action_text("<ACTION>a\nb</ACTION> c") == "a\nb"


def test_private_randomness_continues_its_own_sequence_and_leaves_the_global_one() -> None:
    import numpy as np

    random.seed(7)
    np.random.seed(7)
    expected = [random.random() for _ in range(3)], np.random.rand(3).tolist()
    random.seed(7)
    np.random.seed(7)
    one, other = PrivateRandomness(), PrivateRandomness()
    drawn = {}
    for name, generator in (("one", one), ("other", other)):
        with generator.installed():
            random.seed(1)
            np.random.seed(1)
            drawn[name] = [(random.random(), np.random.rand())]
    outside = [random.random()], [np.random.rand()]
    for name, generator in (("one", one), ("other", other), ("one", one)):
        with generator.installed():
            drawn[name].append((random.random(), np.random.rand()))
    outside[0].extend(random.random() for _ in range(2))
    outside[1].extend(np.random.rand(2))
    assert outside == expected
    own, own_numpy = random.Random(1), np.random.RandomState(1)
    assert drawn["one"] == [(own.random(), own_numpy.rand()) for _ in range(3)]
    assert drawn["one"][:2] == drawn["other"]


def test_private_randomness_is_put_back_after_an_error() -> None:
    random.seed(7)
    before = random.getstate()
    with pytest.raises(TypeError), PrivateRandomness().installed():
        random.seed([])
    assert random.getstate() == before


class Echo:
    """A game of texts: says what it heard, and ends with its third turn."""

    def reset(self, seed):
        self.heard: list[str] = []
        return f"seed {seed}", {}

    def step(self, action):
        self.heard.append(action)
        ended = len(self.heard) == 3
        return f"heard {action}", float(ended), ended, False, {"success": False} if ended else {}

    def close(self):
        self.heard = []


@pytest.fixture
def echo(monkeypatch):
    made = SimpleNamespace(make=lambda game, **options: Echo())
    monkeypatch.setitem(sys.modules, "gymnasium", made)
    return functools.partial(GymnasiumEnv, "Echo-v0")


def test_texts_go_in_and_out(echo) -> None:
    env = echo()
    assert env.reset(seed=3) == ("seed 3", {})
    heard = env.step("<action>hi</action>")
    assert heard == ("heard hi", 0.0, False, False, {"valid_action": True})
    env.step("a")
    assert env.step("b")[1:] == (1.0, True, False, {"valid_action": True, "success": False})
    assert check_env(echo) == []


def test_words_are_actions(echo) -> None:
    env = echo(words={"go": 7}, invalid_reward=-0.1)
    env.reset(seed=3)
    told = "Write one of go.\nseed 3"
    assert env.step("stay") == (told, -0.1, False, False, {"valid_action": False})
    assert env.step("I go")[0] == "heard 7"


@pytest.mark.parametrize(("extra", "make"), [
    ("gem", lambda: GemEnv("dice")), ("gymnasium", lambda: GymnasiumEnv("FrozenLake-v1")),
])  # fmt: skip
def test_a_missing_package_names_the_extra(extra, make, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(ImportError, match=rf"pip install 'trl-stppo\[{extra}\]'"):
        make()


LAKE = {"words": {"left": 0, "down": 1, "right": 2, "up": 3}, "render_mode": "ansi"}


def test_frozen_lake_is_walked_to_the_goal() -> None:
    pytest.importorskip("gymnasium")
    env = GymnasiumEnv("FrozenLake-v1", is_slippery=False, **LAKE)
    assert env.reset(seed=1)[0] == "[S]FFF\nFHFH\nFFFH\nHFFG"
    for action in ("down", "down", "right", "right", "down"):
        assert env.step(action)[1:] == (0.0, False, False, {"valid_action": True})
    observation, *rest = env.step("right")
    assert observation.endswith("HFF[G]")
    assert rest == [1.0, True, False, {"valid_action": True, "success": True}]


@pytest.mark.parametrize("game", ["FrozenLake-v1", "Taxi-v4", "CliffWalking-v1"])
def test_keeps_the_contract(game) -> None:
    pytest.importorskip("gymnasium")
    factory = functools.partial(GymnasiumEnv, game, max_episode_steps=10, **LAKE)
    assert check_env(factory, actions=["left", "up", "?"]) == []
