"""TextArena: what is new, the late reward, the games that are refused; a stand-in, then the package."""

import functools
import random
import sys
from types import ModuleType, SimpleNamespace

import pytest

from trl_stppo.envs import check_env
from trl_stppo.envs.adapters import TextArenaEnv
from trl_stppo.envs.adapters.textarena import GAMES
from trl_stppo.errors import EnvironmentContractError

PROMPT, OWN, BOARD = (SimpleNamespace(name=n) for n in ("PROMPT", "PLAYER_ACTION", "GAME_BOARD"))


class StandIn:
    """Ends on `win`, and on a second invalid move in a row; pays what it is told to."""

    reward = 1

    def reset(self, num_players, seed=None):
        random.seed(seed)
        self.messages = [(-1, f"Rules {random.random():.3f}\n", PROMPT)]
        self.state = SimpleNamespace(error_count=0)
        self.invalid = False

    def get_observation(self):
        messages, self.messages = self.messages, []
        return 0, messages

    def step(self, action):
        self.messages = [(0, action, OWN), (-1, " \n", BOARD), (-1, "Board\n", BOARD)]
        self.invalid = action == "bad" and self.state.error_count == 1
        self.state.error_count = int(action == "bad")
        return action == "win" or self.invalid, {}

    def close(self):
        return {0: self.reward}, {0: {"invalid_move": self.invalid}}


@pytest.fixture
def made(monkeypatch):
    ids: list[str] = []
    package = ModuleType("textarena")
    package.make = lambda env_id: ids.append(env_id) or StandIn()
    monkeypatch.setitem(sys.modules, "textarena", package)
    return ids


def test_only_what_is_new_is_said_and_the_reward_comes_last(made) -> None:
    env = TextArenaEnv("Sudoku-v0-easy")
    assert made == ["Sudoku-v0-easy-raw"]
    assert env.reset(seed=1) == ("Rules 0.134", {})
    assert env.step("[1 1 1]") == ("Board", 0.0, False, False, {"valid_action": True})
    assert env.step("win")[1:] == (1.0, True, False, {"valid_action": True, "success": True})
    with pytest.raises(RuntimeError, match="call reset before step"):
        env.step("win")


def test_a_second_invalid_move_ends_the_game(made, monkeypatch) -> None:
    monkeypatch.setattr(StandIn, "reward", 0.25)
    env = TextArenaEnv("2048-v0", invalid_reward=-0.1)
    env.reset()
    assert env.step("bad")[1:] == (-0.1, False, False, {"valid_action": False})
    assert env.step("good")[1:] == (0.0, False, False, {"valid_action": True})
    env.step("bad")
    assert env.step("bad")[1:] == (0.25, True, False, {"valid_action": False, "success": False})


def test_success_is_left_out_where_a_reward_of_1_means_something_else(made) -> None:
    env = TextArenaEnv("Set-v0")
    env.reset()
    assert env.step("win")[4] == {"valid_action": True}


@pytest.mark.parametrize("reward", ["Bad action format.", None, float("nan")])
def test_a_reward_that_is_no_number_names_the_game(made, monkeypatch, reward) -> None:
    monkeypatch.setattr(StandIn, "reward", reward)
    env = TextArenaEnv("Bandit-v0")
    env.reset()
    with pytest.raises(EnvironmentContractError, match=r"TextArena's Bandit ended with the reward"):
        env.step("win")


@pytest.mark.parametrize(
    ("game", "why"),
    [
        ("Countdown-v0", "Countdown returns its message as the reward"),
        ("ThreeCardMonte-v0-train", "ThreeCardMonte returns its message as the reward"),
        ("Sokoban-v0-medium", "takes too long"),
        ("Chess-v0", "Chess needs several players"),
    ],
)
def test_refused_games_say_why(made, game, why) -> None:
    with pytest.raises(ValueError, match=why):
        TextArenaEnv(game)
    assert made == []


def test_the_global_generator_is_left_alone(made) -> None:
    random.seed(5)
    before = random.getstate()
    TextArenaEnv("Bandit-v0").reset(seed=1)
    assert random.getstate() == before


def test_a_missing_package_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ImportError, match=r"pip install 'trl-stppo\[textarena\]'"):
        TextArenaEnv("Bandit-v0")


PLAYED = [
    *(f"2048-v0{level}" for level in ("-ultra-easy", "-easy", "", "-3x3", "-10x10")),
    *("Bandit-v0", "Bandit-v0-hard", "Blackjack-v0", "Blackjack-v0-long"),
    *("Crosswords-v0", "Crosswords-v0-hardcore", "FifteenPuzzle-v0"),
    *("FrozenLake-v0", "FrozenLake-v0-random", "FrozenLake-v0-hardcore"),
    *("GuessTheNumber-v0", "GuessTheNumber-v0-hardcore", "LightsOut-v0"),
    *("LogicPuzzle-v0", "LogicPuzzle-v0-hard"),
    *("Mastermind-v0", "Mastermind-v0-hard", "Mastermind-v0-extreme"),
    *("Minesweeper-v0", "Minesweeper-v0-small", "Minesweeper-v0-medium", "Minesweeper-v0-hard"),
    *("PegJump-v0", "RushHour-v0", "Secretary-v0", "Secretary-v0-long", "Set-v0", "Sokoban-v0"),
    *("Sudoku-v0-very-easy", "Sudoku-v0", "Sudoku-v0-hard"),
    *("TowerOfHanoi-v0", "TowerOfHanoi-v0-medium", "TowerOfHanoi-v0-extreme"),
]


def test_every_game_that_is_allowed_is_played() -> None:
    assert {game.partition("-v")[0] for game in PLAYED} == set(GAMES)


@pytest.mark.parametrize("game", PLAYED)
def test_keeps_the_contract(game) -> None:
    pytest.importorskip("textarena")
    actions = ["[up]", "[3]", "[1 2 3 4]", "[red]", "[A C]", "[hit]", "[continue]", "[12 5]"]
    found = check_env(functools.partial(TextArenaEnv, game), actions=actions)
    expected = [] if GAMES[game.partition("-v")[0]] else ["without info['success']"]
    found = [message for message in found if "at its slowest" not in message]
    assert [e in f for e, f in zip(expected, found, strict=True)] == [True] * len(expected)


def test_a_number_is_guessed() -> None:
    pytest.importorskip("textarena")
    env = TextArenaEnv("GuessTheNumber-v0")
    assert "1 and 20" in env.reset(seed=1)[0]
    low, high, done = 1, 20, False
    while not done:
        guess = (low + high) // 2
        observation, reward, done, _, info = env.step(f"[{guess}]")
        assert "[" + str(guess) + "]" not in observation
        low, high = (guess + 1, high) if "higher" in observation else (low, guess - 1)
    assert (reward, info) == (1.0, {"valid_action": True, "success": True})
