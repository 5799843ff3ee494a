"""GEM: its grip on the global generators, its texts and ends; a stand-in, then the package."""

import functools
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kit.builders import LIMITS, build, logs
from tests.kit.fake_gem import Dice, install
from tests.kit.fakes import char_tokenizer, tiny_policy
from tests.kit.scripted import assert_same_run
from trl_stppo import STGRPOTrainer
from trl_stppo.envs import check_env
from trl_stppo.envs.adapters import GemEnv
from trl_stppo.envs.adapters.gem import PrivateRandomness


@pytest.fixture
def gem(monkeypatch):
    install(monkeypatch)


def test_threads_do_not_draw_from_each_other(gem) -> None:
    rolls: dict[int, list[str]] = {}

    def play(index: int) -> None:
        env = GemEnv("dice")
        env.reset(seed=1)
        rolls[index] = [env.step("slow")[0] for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(play, range(4)))
    assert all(rolls[index] == rolls[0] for index in range(4))


def test_the_suffix_is_said_too(gem) -> None:
    opening = GemEnv("dice").reset(seed=1)[0]
    assert opening == "A die shows 2.\nBoard."


@pytest.mark.parametrize(("action", "rest"), [
    ("roll", (0.0, False, False, {"valid_action": True})),
    ("solve", (1.0, True, False, {"valid_action": True, "success": True})),
    ("win", (0.25, True, False, {"valid_action": True, "success": True})),
    ("?", (-0.1, True, False, {"valid_action": False, "success": False})),
])  # fmt: skip
def test_ends(gem, action, rest) -> None:
    env = GemEnv("dice")
    env.reset()
    assert env.step(action)[1:] == rest


class PaysAtRandom(Dice):
    """Three turns, each paid with what the global generator says."""

    def reset(self, seed=None):
        self.turns = 0
        return super().reset(seed)

    def step(self, action):
        self.turns += 1
        return str(random.random()), random.random(), self.turns == 3, False, {}


def check_that_a_resumed_run_ends_like_the_whole_one(env_id, folder):
    """With rows that hold no seed: the trainer's own decides which games are played."""
    options = {
        **LIMITS, "variant": "rebn", "num_generations": 1, "gamma": 0.9, "num_mini_batches": 1,
        "save_strategy": "steps", "save_steps": 1, "max_steps": 3, "max_completion_length": 80,
    }  # fmt: skip
    runs = []
    for resume in (None, str(folder / "checkpoint-1")):
        model = tiny_policy(char_tokenizer())
        # A character is a token here, so a game's rules are longer than the usual context of 512.
        model.config.max_position_embeddings = 1024
        arguments = {"environment_factory": functools.partial(GemEnv, env_id), "model": model}
        trainer = build(folder, STGRPOTrainer, arguments=arguments, **options)
        trainer.train(resume_from_checkpoint=resume)
        runs.append(trainer)
    whole, resumed = runs
    assert_same_run(resumed, whole)
    return whole


@pytest.mark.long
def test_a_resumed_run_ends_like_the_whole_one(gem, tmp_path) -> None:
    sys.modules["gem"].make = lambda env_id: PaysAtRandom()
    whole = check_that_a_resumed_run_ends_like_the_whole_one("dice", tmp_path)
    assert logs(whole)["reward_std"] > 0


def test_rows_hold_a_seed_each_and_no_game_twice(gem) -> None:
    [(name, rows)] = GemEnv.datasets().items()
    train, test = rows("train"), rows("test")
    assert name == "gem-seeds"
    assert (len(train), len(test)) == (10_000, 200)
    assert not {*train["seed"]} & {*test["seed"]}
    row = test[0]
    assert row["prompt"] == [{"role": "user", "content": ""}]
    opening = GemEnv("dice").reset(**row)
    assert GemEnv("dice").reset(**row) == opening


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
    monkeypatch.setitem(sys.modules, "gem", None)
    with pytest.raises(ImportError, match=r"pip install 'trl-stppo\[gem\]'"):
        GemEnv("dice")


GAMES = "GuessTheNumber Mastermind Minesweeper Sokoban Game2048 FifteenPuzzle Crosswords Sudoku"
PLAYED = [f"game:{game}-v0-easy" for game in (*GAMES.split(), "TowerofHanoi")]
PLAYED += ["game:GuessTheNumber-v0-random", "rg:leg_counting"]


@pytest.mark.parametrize("env_id", PLAYED)
def test_keeps_the_contract(env_id) -> None:
    pytest.importorskip("gem")
    actions = ["\\boxed{7}", "\\boxed{up}", "\\boxed{reveal 0 0}", "\\boxed{1 2 3 4}"]
    found = check_env(functools.partial(GemEnv, env_id), actions=actions)
    assert [message for message in found if "at its slowest" not in message] == []
