"""GEM: its grip on the global generators, its texts and ends; a stand-in, then the package."""

import functools
import random
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest

from trl_stppo.envs import check_env
from trl_stppo.envs.adapters import GemEnv


class Dice:
    """Draws from the global generator, as GEM's games do."""

    def reset(self, seed=None):
        if seed is not None:
            random.seed(seed)
        return f"A die shows {random.randint(1, 6)}.\n", {"suffix": "Board."}

    def step(self, action):
        if action == "?":
            return "no", -0.1, True, True, {}
        if action == "win":
            return "Congratulations! All found.", 0.25, True, False, {}
        if action == "slow":
            random.random()
            time.sleep(0.001)  # another thread may draw now
        return str(random.random()), 1.0 if action == "solve" else 0.0, action == "solve", False, {}


@pytest.fixture
def gem(monkeypatch):
    package, utils, constants = (ModuleType(n) for n in ("gem", "gem.utils", "gem.utils.constants"))
    package.make = lambda env_id, **options: Dice()
    constants.LanguageGameReward = SimpleNamespace(success_reward=1.0, format_error_reward=-0.1)
    package.utils, utils.constants = utils, constants
    for module in (package, utils, constants):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_the_global_generator_is_left_alone(gem) -> None:
    random.seed(5)
    before = random.getstate()
    env = GemEnv("dice")
    env.reset(seed=1)
    env.step("roll")
    assert random.getstate() == before


def test_instances_do_not_draw_from_each_other(gem) -> None:
    def play(env: GemEnv, turns: int) -> list[str]:
        return [env.step("roll")[0] for _ in range(turns)]

    alone = GemEnv("dice")
    alone.reset(seed=1)
    expected = play(alone, 4)
    assert len(set(expected)) == 4
    one, other = GemEnv("dice"), GemEnv("dice")
    one.reset(seed=1)
    other.reset(seed=1)
    mixed = [(one.step("roll")[0], other.step("roll")[0]) for _ in range(4)]
    assert mixed == [(value, value) for value in expected]


def test_threads_do_not_draw_from_each_other(gem) -> None:
    rolls: dict[int, list[str]] = {}

    def play(index: int) -> None:
        env = GemEnv("dice")
        env.reset(seed=1)
        rolls[index] = [env.step("slow")[0] for _ in range(20)]

    threads = [threading.Thread(target=play, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(rolls[index] == rolls[0] for index in range(4))


def test_the_suffix_is_said_too(gem) -> None:
    opening = GemEnv("dice").reset(seed=1)[0]
    assert opening == "A die shows 2.\nBoard."


@pytest.mark.parametrize(
    ("action", "rest"),
    [
        ("roll", (0.0, False, False, {"valid_action": True})),
        ("solve", (1.0, True, False, {"valid_action": True, "success": True})),
        ("win", (0.25, True, False, {"valid_action": True, "success": True})),
        ("?", (-0.1, True, False, {"valid_action": False, "success": False})),
    ],
)
def test_ends(gem, action, rest) -> None:
    env = GemEnv("dice")
    env.reset()
    assert env.step(action)[1:] == rest
    if rest[1]:
        with pytest.raises(RuntimeError, match="call reset before step"):
            env.step(action)


def test_a_missing_package_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gem", None)
    with pytest.raises(ImportError, match="pip install 'gem-llm"):
        GemEnv("dice")


PLAYED = [
    *(f"game:GuessTheNumber-v0-{level}" for level in ("easy", "hard", "random")),
    *(f"game:Mastermind-v0-{level}" for level in ("easy", "hard", "random")),
    *(f"game:Minesweeper-v0-{level}" for level in ("easy", "hard", "random")),
    *(f"game:Sokoban-v0-{level}" for level in ("easy", "random")),
    *(f"game:Game2048-v0-{level}" for level in ("easy", "hard", "extreme-hard", "random")),
    *(f"game:FifteenPuzzle-v0-{level}" for level in ("easy", "hard")),
    *(f"game:Crosswords-v0-{level}" for level in ("easy", "hard")),
    *(f"game:Sudoku-v0-{level}" for level in ("easy", "hard", "random")),
    *(f"game:TowerofHanoi-v0-{level}" for level in ("easy", "hard", "random")),
    "rg:leg_counting",
]


@pytest.mark.parametrize("env_id", PLAYED)
def test_keeps_the_contract(env_id) -> None:
    pytest.importorskip("gem")
    actions = ["\\boxed{7}", "\\boxed{up}", "\\boxed{reveal 0 0}", "\\boxed{1 2 3 4}"]
    found = check_env(functools.partial(GemEnv, env_id), actions=actions)
    assert [message for message in found if "at its slowest" not in message] == []


def test_a_number_is_guessed() -> None:
    pytest.importorskip("gem")
    env = GemEnv("game:GuessTheNumber-v0-easy")
    assert "\\boxed{}" in env.reset(seed=1)[0]
    for guess in range(1, 11):
        observation, reward, terminated, truncated, info = env.step(f"\\boxed{{{guess}}}")
        if terminated:
            break
    assert observation.startswith("Congratulations!")
    assert (reward, truncated, info) == (1.0, False, {"valid_action": True, "success": True})
