"""Games of the TextWorld recipe: made as asked for, played as demonstrated, paid as described."""

import json
from functools import partial

import pytest

from tests.kit.script_kit import scripts
from trl_stppo.envs import check_env

with scripts():
    import adventures
    from adventures import GameKind, game_rows, make_games
    from textworld_env import TextWorldEnv

KIND = GameKind(rooms=2, objects=3, quest_length=3, step_points=True, theme="basic")
PARTS = ("description", "feedback", "inventory")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("textworld.generator")
    return tmp_path_factory.mktemp("games")


@pytest.fixture(scope="module")
def made(folder):
    return make_games(folder, KIND, range(3))


def manifest(folder):
    return [json.loads(line) for line in (folder / adventures.MANIFEST).read_text().splitlines()]


def test_a_folder_has_a_row_per_game_and_no_game_is_made_twice(folder, made, monkeypatch):
    assert [row["game"] for row in manifest(folder)] == [f"w2-o3-q3-points-basic-s{s}.z8" for s in range(3)]
    assert {path.suffix for path in folder.iterdir()} == {".z8", ".json", ".jsonl"}
    monkeypatch.setattr(adventures, "_make", lambda *_: pytest.fail("made again"))
    assert make_games(folder, KIND, [2, 0]) == [made[2], made[0]]


@pytest.mark.parametrize("reward", ["sparse", "dense"])
def test_the_walkthrough_wins_and_is_paid_one_in_all(made, reward):
    for row in game_rows(made):
        env = TextWorldEnv(reward=reward, show=PARTS)
        env.reset(**row)
        steps = [env.step(command) for command in row["walkthrough"]]
        rewards = [step[1] for step in steps]
        points = row["max_score"]
        assert sum(rewards) == pytest.approx(1.0)
        assert steps[-1][2:] == (True, False, {"valid_action": True, "success": True})
        if reward == "sparse":
            assert rewards == [0.0, 0.0, 1.0]
        else:
            assert sorted({*rewards} - {0.0}) == [pytest.approx(1 / points)]
            assert points >= 2
        env.close()


def test_the_games_keep_the_contract(made):
    rows = game_rows(made)
    factory = partial(TextWorldEnv, show=PARTS, reward="dense")
    found = check_env(factory, rows=rows[:1], actions=["look", *rows[0]["walkthrough"]])
    assert [message for message in found if "at its slowest" not in message] == []


@pytest.mark.parametrize("after", ["generation", "compilation"])
def test_what_is_interrupted_leaves_nothing_half(tmp_path, monkeypatch, after):
    textworld = pytest.importorskip("textworld.generator")

    def interrupted(game, options):
        if after == "compilation":
            compiled(game, options)
        raise KeyboardInterrupt

    compiled = textworld.compile_game
    monkeypatch.setattr(textworld, "compile_game", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_games(tmp_path, KIND, [0])
    assert list(tmp_path.iterdir()) == []
