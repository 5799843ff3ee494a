"""The stability study's bookkeeping: its tasks, what collapses, what is resumed, what stages decide."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from trl_stppo.envs import check_env

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def study(script):
    names = ("grid", "report", "stages", "tasks")
    return {name: script(f"_stability_{name}") for name in names}


def rows_of(success, start=0.2, end=None, **extra):
    rows = [{"phase": "test", "update": 0, "episode/success_rate": start}]
    for update, value in enumerate(success, start=1):
        figures = {"clip_bias/scale": 0.5, "clip_bias/norm": 1.0, "clip_bias/grad_norm": 3.0}
        figures |= {"clip_bias/estimated_share": 0.7, "policy/approx_kl": 0.1}
        rows.append({"phase": "train", "update": update, "episode/success_rate": value, **figures})
    end = success[-1] if end is None else end
    return [*rows, {"phase": "test", "update": len(success), "episode/success_rate": end, **extra}]


def add(table, cell, final, best=0.9):
    table.add(cell, rows_of([best, best, best, final], end=final, seconds=1.0))


def test_the_corridor_pays_for_seven_right_doors_alone(study):
    tasks = study["tasks"]
    for wrong in (None, 0, 6):
        env = tasks.CorridorEnv()
        env.reset(seed=3, colour="pink")
        for room in range(tasks.ROOMS):
            door = env.right_door
            if room == wrong:
                door = next(other for other in tasks.DOORS if other != door)
            *_, reward, terminated, truncated, info = env.step(f"i seek pink {door}")
            assert info["valid_action"]
            assert terminated == (room == tasks.ROOMS - 1)
            assert not truncated
        assert reward == float(wrong is None)
        assert info["success"] == (wrong is None)


@pytest.mark.parametrize("action", ["", "left", "i seek red left", "i seek pink up", "i seek pink"])
def test_what_cannot_be_read_is_a_wrong_door(study, action):
    env = study["tasks"].CorridorEnv()
    env.reset(seed=3, colour="pink")
    *_, info = env.step(action)
    assert info["valid_action"] == (action == "i seek red left")
    for _ in range(6):
        _, reward, *_ = env.step(f"i seek pink {env.right_door}")
    assert reward == 0.0


def test_the_corridor_keeps_the_contract(study):
    tasks = study["tasks"]
    check_env(tasks.CorridorEnv, tasks.corridor_rows(2, 0))
    train = {row["seed"] for row in tasks.corridor_rows(4096, tasks.TRAIN_SEED)}
    assert not train & {row["seed"] for row in tasks.corridor_rows(256, tasks.TEST_SEED)}


def test_demonstrations_of_text_adventures_get_there_in_the_end(script):
    task, dice = script("_textworld_task"), random.Random(0)
    steps = ["go north", "take key", "open box"]
    assert task.with_mistakes(steps, 0.0, dice) == [f" {step}" for step in steps]
    played = [task.with_mistakes(steps, 0.5, dice) for _ in range(200)]
    mistakes = sum(len(commands) - 3 for commands in played)
    assert 500 < mistakes < 700  # one for each step, on average
    for commands in played:
        assert {command.strip() for command in commands} == {*steps}
        assert commands[-1] == " open box"
    assert task.with_mistakes(["look"], 0.9, dice) == [" look"]


def test_the_adventures_agent_is_warmed_up_on_games_and_tested_on_others(
    script, tmp_path, monkeypatch
):
    pytest.importorskip("textworld")
    task, tasks = script("_textworld_task"), script("_stability_tasks")
    monkeypatch.setattr(task, "TRAIN_SEEDS", range(2))
    monkeypatch.setattr(task, "TEST_SEEDS", range(2, 3))
    tasks.build_agent("textworld", tmp_path, steps=1)
    sparse, dense = (tasks.load_task(name, tmp_path) for name in ("textworld", "textworld-dense"))
    assert (sparse.agent / "config.json").is_file()
    assert sparse.train.to_list() == dense.train.to_list()
    assert not {*sparse.train["game"]} & {*sparse.test["game"]}
    assert {*sparse.train["max_turns"]} == {sparse.settings["max_turns"]} == {6}
    paid = []
    for env in (sparse.environment(), dense.environment()):
        env.reset(**sparse.test[0])
        paid.append([env.step(command)[1] for command in sparse.test[0]["walkthrough"]])
    assert paid[0] == [0.0, 0.0, 0.0, 1.0]
    assert sum(paid[1]) == pytest.approx(1.0)
    assert len([reward for reward in paid[1] if reward]) > 1


@pytest.mark.parametrize(
    ("success", "end", "extra", "collapsed"),
    [
        ([0.3, 0.6, 0.9, 0.9, 0.9], 0.46, {}, False),
        ([0.3, 0.6, 0.9, 0.9, 0.9], 0.44, {}, True),
        ([0.9, 0.0, 0.0, 0.0, 0.0], 0.2, {}, False),  # one lucky rollout is no success
        ([0.2, 0.1, 0.1, 0.0, 0.0], 0.09, {}, True),  # below half of the start
        ([0.2, 0.9, 0.9, 0.9], 0.9, {"failed": True}, True),
    ],
)
def test_a_run_has_collapsed_when_it_ends_below_half_of_its_best(
    study, success, end, extra, collapsed
):
    rows = rows_of(success, end=end, seconds=1.0)
    if extra:
        rows.insert(-1, {"phase": "failed", "update": 4, "error": "NonFiniteError"})
    judged = study["report"].judge([{k: str(v) for k, v in row.items()} for row in rows])
    assert judged["collapsed"] == collapsed
    assert judged["final"] == (0.0 if extra else end)
    assert judged["area"] == pytest.approx(sum(success) / len(success))


def test_a_run_that_was_cut_off_is_run_again(study, tmp_path):
    grid = study["grid"]
    table = grid.Table(tmp_path / "results.csv")
    cells = [grid.Cell("pilot", "corridor", "ppo", "none", 1e-4, seed) for seed in (1, 2)]
    for cell in cells:
        add(table, cell, 0.5)
    with open(table.path) as file:
        lines = file.readlines()
    again = grid.Table(table.path)
    assert again.keys == {cell.key for cell in cells}
    assert again.rows == table.rows
    table.path.write_text("".join(lines[:-1])[:-5])  # in the middle of a line
    again = grid.Table(table.path)
    assert again.keys == {cells[0].key}
    add(again, cells[1], 0.5)
    assert grid.Table(table.path).rows == table.rows


def study_table(study, folder, threshold=("stale", 5.5e-4)):
    """Pilots that collapse from a level on, and tuning runs of which one correction is best."""
    grid, stages = study["grid"], study["stages"]
    table = grid.Table(folder / "results.csv")
    order = [(r, p) for r in grid.LEARNING_RATES for p in list(grid.PRESSURES)[1:]]
    first = order.index((threshold[1], threshold[0]))
    for cell in stages.pilot(table):
        level = (cell.learning_rate, cell.pressure)
        lost = cell.pressure != "none" and order.index(level) >= first and cell.seed != 100
        best = 0.9 if cell.learning_rate == 3e-4 else 0.8
        add(table, cell, 0.1 if lost else best)
    for cell in stages.tune(table):
        right = (cell.mode, cell.power, cell.target) == ("share", 2.0, "update")
        add(table, cell, 0.85 if right else 0.6)
    return table


@pytest.mark.slow
def test_stages_follow_from_those_before(study, tmp_path):
    stages = study["stages"]
    table = study_table(study, tmp_path)
    levels = {"none": ("none", 3e-4), "threshold": ("stale", 5.5e-4), "extreme": ("both", 1e-3)}
    assert stages.decisions(table) == {"levels": levels, "correction": ("share", 2.0, "update")}
    seeds = {name: {cell.seed for cell in stages.STAGES[name](table)} for name in ("tune", "test")}
    assert not seeds["tune"] & seeds["test"]
    assert len(seeds["test"]) >= 5
    for cell in stages.test(table):
        add(table, cell, 0.7)
    control = stages.control(table)
    assert {cell.learning_rate for cell in control} == {2.75e-4, 5e-4}  # half, as the scale says
    assert {cell.method for cell in control} == {"turn-ppo"}
    for name in ("demo", "sgd"):
        assert stages.STAGES[name](table)
    for cell in stages.ranges(table):
        add(table, cell, 0.8 if cell.cliprange == 0.03 else 0.7)
    second = stages.second(table)
    assert {cell.cliprange for cell in second if cell.method == "st-ppo"} == {0.03}
    assert {cell.cliprange for cell in second if cell.method == "s-ppo"} == {0.2}
    assert not {cell.seed for cell in second} & (seeds["tune"] | seeds["test"])


def test_intervals(study, tmp_path):
    table = study_table(study, tmp_path)
    for cell in study["stages"].test(table):
        add(table, cell, 0.5 + cell.seed / 10)
    entry = next(e for e in study["report"].summaries(table) if e["stage"] == "test")
    assert entry["runs"] == 5
    assert entry["final"] == pytest.approx(0.7)
    assert 0.5 < entry["final_low"] < 0.7 < entry["final_high"] < 0.9


def test_the_pictures_show_every_rival_and_all_that_the_test_has_run(script):
    plots = script("plot_stability")
    records = plots.recorded()
    figure = plots.draw_rivals(records)
    (axis,) = figure.axes
    rivals = [label.get_text() for label in axis.get_yticklabels()]
    assert len(rivals) == len({r["key"][2] for r in records if r["key"][0] == "first"})
    assert rivals[-1] == "winners+share-logits"
    headline = plots.draw_headline(records)
    for axis in headline.axes:
        assert len(axis.lines) == len(plots.ARMS)
        assert axis.get_title().split("\n")[0] in plots.TASKS
    shown = [text.get_text() for text in headline.axes[-1].texts]
    assert shown == sorted(plots.ARMS.values(), key=shown.index)
