"""TextWorld: scores, text and odd commands with a stand-in, then a generated game."""

import functools
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from trl_stppo.envs import check_env
from trl_stppo.envs.adapters import TextWorldEnv

BANNER = "\n\n   ________  \n  |        \\ \n  \\$$$$| $$ \n   >$$  $$  \n\n"
STATUS = "\n\n>" + " " * 30 + "-= Attic =-0/1"


class StandIn:
    """A game whose score rises with `win`, and whose parser knows `look` and `win`."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def reset(self):
        self.moves = self.score = 0
        return self.state(f"{BANNER}Find the key.\n\n\n\n-= Attic =-\nDusty.{STATUS}")

    def state(self, feedback: str):
        return SimpleNamespace(
            feedback=feedback,
            moves=self.moves,
            won=self.score == 3,
            admissible_commands=["look", "win"],
        )

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
    assert env.step("win") == (
        "You win.",
        1.0,
        True,
        False,
        {"valid_action": True, "success": True},
    )
    env.reset()
    assert env.step("look")[1] == 0.0  # not -3


def test_banner_and_status_line_are_gone(game) -> None:
    assert TextWorldEnv(game[1]).reset()[0] == "Find the key.\n\n-= Attic =-\nDusty."


def test_commands_are_listed_on_request(game) -> None:
    env = TextWorldEnv(game[1], admissible_commands=True)
    assert env.reset()[0].endswith("Dusty.\n\nCommands: look; win")


def test_what_the_parser_refuses_is_invalid_and_has_its_price(game) -> None:
    env = TextWorldEnv(game[1], invalid_reward=-0.5)
    env.reset()
    assert env.step("dance")[1:] == (-0.5, False, False, {"valid_action": False})
    assert env.step("win")[1] == 1.0


@pytest.mark.parametrize(
    ("action", "command"),
    [
        ("look", "look"),
        ("I think\nlook ", "look"),
        ("<action>look</action> and wait", "look"),
        ("", ""),
        ("\x00", ""),
        ("lo\x00ok\x1b", "look"),
        ("x" * 1000, "x" * 150),
    ],
)
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


@pytest.mark.parametrize("path", [None, "nowhere.z8", __file__])
def test_a_file_that_is_no_game_is_refused(game, path) -> None:
    with pytest.raises(ValueError, match=r"path of a \.z8 file that exists"):
        TextWorldEnv().reset(game=path)


def test_a_missing_package_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "textworld", None)
    with pytest.raises(ImportError, match="pip install 'textworld"):
        TextWorldEnv("a.z8").reset()


@pytest.fixture(scope="module")
def real_game(tmp_path_factory):
    """A generated quest of eight scored steps."""
    textworld = pytest.importorskip("textworld")
    maker = Path(textworld.__file__).parents[1] / "bin" / "tw-make"
    if not maker.exists():
        maker = Path(sys.executable).with_name("tw-make")
    path = tmp_path_factory.mktemp("textworld") / "game.z8"
    flags = ["tw-simple", "--rewards", "dense", "--goal", "detailed", "--seed", "1", "--output"]
    made = subprocess.run(
        [sys.executable, str(maker), *flags, str(path)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no game could be generated: {made.stderr[-200:]!r}")
    return str(path)


WALKTHROUGH = [
    "open antique trunk",
    "take old key from antique trunk",
    "unlock wooden door with old key",
    "open wooden door",
    "go east",
    "go south",
    "take milk from couch",
    "go north",
    "put milk on stove",
]


def test_a_generated_game_is_won(real_game) -> None:
    env = TextWorldEnv(real_game, admissible_commands=True)
    opening = env.reset(prompt="x")[0]
    assert opening.startswith("Hey, thanks for coming over to the TextWorld today")
    assert "open antique trunk" in opening.rpartition("Commands: ")[2]
    assert not {"$", ">"} & set(opening)
    assert env.step("fly to the moon")[4] == {"valid_action": False}
    assert env.step("\x00")[4] == {"valid_action": False}
    steps = [env.step(command) for command in WALKTHROUGH]
    assert sum(step[1] for step in steps) == 8.0
    assert max(step[1] for step in steps) == 1.0
    assert steps[-1][2:] == (True, False, {"valid_action": True, "success": True})
    env.close()


def test_keeps_the_contract(real_game) -> None:
    factory = functools.partial(TextWorldEnv, real_game, max_steps=10)
    found = check_env(factory, actions=["look", *WALKTHROUGH])
    assert [message for message in found if "at its slowest" not in message] == []
