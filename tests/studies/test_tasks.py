"""The studies' tasks: their rules against scripted players, and a tiny training of each."""

import pytest

# Between them every task, every trainer and every way to play.
SMALL = [
    ("hanoi", "STPPOTrainer"),
    ("hanoi", "GRPOTrainer"),
    ("guess", "STGRPOTrainer"),
    ("corridor", "STPPOTrainer"),
    ("demo", "STPPOTrainer"),
    ("house", "GRPOTrainer"),
    ("relay", "STPPOTrainer"),
    ("textworld", "STPPOTrainer"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("agents")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("task", "trainer"), SMALL)
def test_a_task_makes_a_tiny_training(task, trainer, folder, script):
    if task == "textworld":
        pytest.importorskip("textworld.generator")
    cell = script("_plan").Cell("quick", task, "arm", "default", 5, {"trainer": trainer})
    record = script("_cell").run(cell, folder, small=True)
    assert record["error"] is None
    assert (record["trainer"], record["rollouts"], record["seed"]) == (trainer, 2, 5)
    curve = record["curves"][record["measure"]]
    assert len(curve) == 2
    assert all(0.0 <= value <= 1.0 for value in curve)
    tested = record["evaluation"]
    assert (tested is not None) is (task not in ("house", "relay"))
    assert tested is None or 0.0 <= tested["after"] <= 1.0
    assert {"commit", "date", "versions", "processor", "seconds", "cpu"} <= set(record)


@pytest.mark.long
def test_a_training_that_dies_is_a_result(folder, script, monkeypatch):
    module = script("_cell")

    class Dies(module.trainer_class("STPPOTrainer", folder)):
        def training_step(self, *args, **kwargs):
            raise FloatingPointError("nothing left")

    monkeypatch.setattr(module, "trainer_class", lambda *_: Dies)
    cell = script("_plan").Cell("quick", "hanoi", "arm", "default", 5)
    record = module.run(cell, folder, small=True)
    assert "nothing left" in record["error"]
    assert script("_report").final(record) == 0.0


def test_the_corridor_rewards_seven_right_doors_alone(script):
    corridor = script("tasks.corridor")
    for wrong in (None, 6):
        env = corridor.CorridorEnv()
        env.reset(seed=3, colour="pink")
        for room in range(corridor.ROOMS):
            right = env.right_door
            door = next(d for d in corridor.DOORS if d != right) if room == wrong else right
            *_, reward, _, _, info = env.step(f"i seek pink {door}")
        assert reward == float(wrong is None) == float(info["success"])


def test_the_best_moves_solve_hanoi_from_everywhere_within_its_moves(script):
    hanoi = script("tasks.hanoi")
    far = hanoi.distances()
    assert (len(far), max(far.values())) == (27, 7)
    for start in hanoi.STARTS:
        env, over = hanoi.HanoiEnv(), False
        env.reset(start=start)
        while not over:
            moves = {move: hanoi.moved(env.where, move) for move in hanoi.ACTIONS}
            best = min(filter(moves.get, moves), key=lambda move: far[moves[move]])
            _, reward, over, _, _ = env.step(best)
        assert reward == 1.0
    # A larger disc does not lie upon a smaller one.
    assert hanoi.moved("ABB", "BA") is None
    assert hanoi.moved("ABB", "AC") == "CBB"
