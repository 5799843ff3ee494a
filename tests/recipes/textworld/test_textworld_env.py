"""TextWorld: scores, text and odd commands with a stand-in, then a generated game."""

import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

import pytest

from tests.kit.script_kit import scripts

with scripts():
    from textworld_env import TextWorldEnv

BANNER = "\n\n   ________  \n  |        \\ \n  \\$$$$| $$ \n   >$$  $$  \n\n"
STATUS = "\n\n>" + " " * 30 + "-= Attic =-0/1"


class StandIn:
    """A game whose score rises with `win`, and whose parser knows `look` and `win`."""

    most = 3

    def __init__(self) -> None:
        self.heard: list[str] = []

    def reset(self):
        self.moves = self.score = 0
        return self.state(f"{BANNER}Find the key.\n\n\n\n-= Attic =-\nDusty.{STATUS}")

    def state(self, feedback: str):
        seen = {"description": "-= Attic =-\nDusty.", "inventory": "You carry a lamp.\n"}
        seen["feedback"] = feedback
        won = {"won": self.score == 3, "max_score": self.most, "moves": self.moves}
        return SimpleNamespace(**seen, **won)

    def step(self, command: str):
        self.heard.append(command)
        self.moves += command in ("look", "win")
        self.score += command == "win"
        return self.state(f"\nYou {command}.{STATUS}"), self.score, self.score == 3

    def close(self) -> None:
        self.heard.append("closed")


@pytest.fixture
def game(monkeypatch, tmp_path):
    stand_in = StandIn()
    module = ModuleType("textworld")
    module.EnvInfos = lambda **wanted: wanted
    module.start = lambda path, wanted: stand_in
    monkeypatch.setitem(sys.modules, "textworld", module)
    (tmp_path / "a.z8").touch()
    return stand_in, str(tmp_path / "a.z8")


def test_a_cumulative_score_becomes_rewards_of_turns(game) -> None:
    env = TextWorldEnv(game[1])
    env.reset()
    rewards = [env.step(action)[1] for action in ("win", "look", "win")]
    assert rewards == [1.0, 0.0, 1.0]
    info = {"valid_action": True, "success": True}
    assert env.step("win") == ("You win.", 1.0, True, False, info)
    env.reset()
    assert env.step("look")[1] == 0.0


@pytest.mark.parametrize(("reward", "expected"), [
    ("score", [1, 0, -0.5, 1, 1]),
    ("dense", [1 / 3, 0, -0.5, 1 / 3, 1 / 3]),
    ("sparse", [0, 0, -0.5, 0, 1]),
])  # fmt: skip
def test_what_each_kind_of_reward_pays(game, reward, expected) -> None:
    env = TextWorldEnv(game[1], reward=reward, invalid_reward=-0.5)
    env.reset()
    actions = ("win", "look", "dance", "win", "win")
    steps = [env.step(action) for action in actions]
    assert [step[1] for step in steps] == expected
    assert steps[2][2:] == (False, False, {"valid_action": False})


@pytest.mark.parametrize("most", [0, float("inf")])
def test_there_is_no_share_of_no_points_or_endless_ones(game, most) -> None:
    game[0].most = most
    with pytest.raises(ValueError, match=r"reward is 'dense'.*'score'"):
        TextWorldEnv(game[1], reward="dense").reset()


def test_an_observation_shows_what_was_asked_for_in_this_order_and_nothing_twice(game) -> None:
    env = TextWorldEnv(game[1], show=("description", "feedback", "inventory"))
    assert env.reset()[0] == "Find the key.\n\n-= Attic =-\nDusty.\n\nYou carry a lamp."
    assert env.step("look")[0] == "-= Attic =-\nDusty.\n\nYou look.\n\nYou carry a lamp."
    env = TextWorldEnv(game[1], show=["inventory", "description"])
    assert env.reset()[0] == "You carry a lamp.\n\n-= Attic =-\nDusty."


@pytest.mark.parametrize(("action", "command"), [
    ("look", "look"),
    ("I think\nlook ", "look"),
    ("<action>look</action> and wait", "look"),
    ("", ""),
    ("\x00", ""),
    ("lo\x00ok\x1b", "look"),
    ("\\boxed{look}", "boxed{look}"),
    ("x" * 1000, "x" * 150),
])  # fmt: skip
def test_only_a_clean_last_line_reaches_the_interpreter(game, action, command) -> None:
    env = TextWorldEnv(game[1])
    env.reset()
    env.step(action)
    assert game[0].heard == [command]


def test_too_many_turns_truncate(game) -> None:
    env = TextWorldEnv(max_steps=2)
    env.reset(game=game[1])
    env.step("look")
    assert env.step("?")[1:] == (0.0, False, True, {"valid_action": False, "success": False})
    with pytest.raises(RuntimeError, match="call reset before step"):
        env.step("look")


def test_the_row_limits_turns_where_the_constructor_does_not(game) -> None:
    for settings, turns in (({}, 1), ({"max_steps": 2}, 2)):
        env = TextWorldEnv(game[1], **settings)
        env.reset(max_turns=1)
        assert [env.step("look")[3] for _ in range(turns)] == [False] * (turns - 1) + [True]


def test_games_are_read_one_at_a_time(game, monkeypatch) -> None:
    """TextWorld's parser is one for all: two threads in it pop from each other's stack."""
    inside, most = [0], [0]
    entered = threading.Barrier(2)

    def start(path, wanted):
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        with contextlib.suppress(threading.BrokenBarrierError):
            entered.wait(0.2)
        inside[0] -= 1
        return game[0]

    monkeypatch.setattr(sys.modules["textworld"], "start", start)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: TextWorldEnv(game[1]).reset(), range(2)))
    assert most == [1]


@pytest.mark.parametrize("path", [None, "nowhere.z8", __file__])
def test_a_file_that_is_no_game_is_refused(game, path) -> None:
    with pytest.raises(ValueError, match=r"game is .*path of a \.z8 file"):
        TextWorldEnv().reset(game=path)
