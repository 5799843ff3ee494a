"""Reading actions, and Gymnasium's toy-text games where the package is installed."""

import functools
import random
import sys

import pytest

from trl_stppo.envs import check_env
from trl_stppo.envs.adapters import BlackjackEnv, CliffWalkingEnv, FrozenLakeEnv, TaxiEnv
from trl_stppo.envs.adapters._common import PrivateRandomness, action_text, last_word

GAMES = [FrozenLakeEnv, CliffWalkingEnv, TaxiEnv, BlackjackEnv]


@pytest.mark.parametrize(
    ("text", "word"),
    [
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
    ],
)
def test_last_word(text: str, word: str | None) -> None:
    assert last_word(text, ["left", "right", "up", "down", "pick up", "go", "go up"]) == word


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


def test_a_missing_package_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ImportError, match=r"pip install 'trl-stppo\[gymnasium\]'"):
        FrozenLakeEnv()


@pytest.fixture
def gymnasium():
    return pytest.importorskip("gymnasium")


def test_frozen_lake_is_walked_to_the_goal(gymnasium) -> None:
    env = FrozenLakeEnv(is_slippery=False, rules="", invalid_reward=-0.1)
    board = "@ F F F\nF H F H\nF F F H\nH F F G\nYou are in row 1, column 1."
    assert env.reset(seed=1) == (board, {})
    assert env.step("hm") == (
        f"Write one of left, down, right, up.\n{board}",
        -0.1,
        False,
        False,
        {"valid_action": False},
    )
    for action in ("down", "down", "right", "right", "down"):
        assert env.step(f"<action>{action}</action>")[1:] == (
            0.0,
            False,
            False,
            {"valid_action": True},
        )
    observation, *rest = env.step("right")
    assert observation.endswith("H F F @\nYou are in row 4, column 4.")
    assert rest == [1.0, True, False, {"valid_action": True, "success": True}]
    with pytest.raises(RuntimeError, match="call reset before step"):
        env.step("left")
    assert env.reset()[0] == board


def test_a_hole_is_the_end_without_success(gymnasium) -> None:
    env = FrozenLakeEnv(is_slippery=False)
    env.reset()
    env.step("down")
    assert env.step("right")[1:] == (0.0, True, False, {"valid_action": True, "success": False})


def test_a_time_limit_truncates(gymnasium) -> None:
    env = CliffWalkingEnv(max_steps=2)
    env.reset()
    assert env.step("up")[1:] == (-1.0, False, False, {"valid_action": True})
    env.step("?")  # costs no step
    assert env.step("up")[1:] == (-1.0, False, True, {"valid_action": True, "success": False})


def test_the_cliff(gymnasium) -> None:
    env = CliffWalkingEnv()
    opening = env.reset()[0]
    assert opening.endswith("@ C C C C C C C C C C G\nYou are in row 4, column 1.")
    assert env.step("right")[1] == -100.0
    for action in ["up", *["right"] * 11]:
        assert env.step(action)[1:3] == (-1.0, False)
    assert env.step("down")[1:] == (-1.0, True, False, {"valid_action": True, "success": True})


def test_taxi_takes_the_passenger_home(gymnasium) -> None:
    env = TaxiEnv()
    opening = env.reset(seed=3)[0]  # the taxi in row 1, column 4; the passenger at R, to Y
    assert opening.endswith("The passenger waits at R and wants to go to Y.")
    assert "|R: |@: :G|" in opening
    assert env.step("pick up")[1] == -10.0
    way_there = ["south", "west", "south", "west", "west", "north", "north"]
    for action in way_there:
        env.step(action)
    assert "is in the taxi" in env.step("pickup")[0]
    for action in ["south"] * 4:
        env.step(action)
    assert env.step("drop off")[1:] == (20.0, True, False, {"valid_action": True, "success": True})


def test_blackjack_success_is_winning(gymnasium) -> None:
    env, outcomes = BlackjackEnv(), set()
    for seed in range(40):
        assert env.reset(seed=seed) == env.reset(seed=seed)
        _, reward, terminated, _, info = env.step("I stand")
        assert terminated
        outcomes.add((reward, info["success"]))
    assert outcomes == {(1.0, True), (0.0, False), (-1.0, False)}


@pytest.mark.parametrize("game", GAMES)
def test_keeps_the_contract(gymnasium, game) -> None:
    actions = ["north", "left", "up", "pickup", "hit", "?"]
    assert check_env(functools.partial(game, max_steps=10), actions=actions) == []
