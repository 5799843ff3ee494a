"""The studies' harness: cells of a file, records that survive kills, workers, the report's numbers."""

import gzip
import json

import pytest

from tests.kit.script_kit import ROOT

STUDIES = ROOT / "benchmarks" / "studies"
FILES = sorted(STUDIES.glob("*.toml"))
STUDY = """
base = "a"
tasks = ["house"]
seeds = ["3-4", 7]
[arms]
a = {}
b = {trainer = "GRPOTrainer", learning_rate = 2e-3}
[settings]
slow = {learning_rate = 1e-3, num_iterations = 2}
fast = {learning_rate = 1e-2}
"""


@pytest.fixture
def study(tmp_path, script):
    def read(text):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return script("_plan").read(path)

    return read


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_cells_of_a_shipped_study_have_configurations(path, script, tmp_path):
    cell_of, load = script("_cell"), script("_task").load
    study = script("_plan").read(path)
    kinds = {cell.key[:3]: cell for cell in study.cells}
    for cell in kinds.values():
        kind = cell_of.trainer_class(cell.overrides.get("trainer", "STPPOTrainer"), tmp_path)
        config, _ = cell_of.config_of(kind, load(cell.task), cell, str(tmp_path))
        assert config.learning_rate > 0
    recorded = STUDIES / "records" / f"{path.stem}.jsonl.gz"
    script("_records").Records(recorded).missing(study.cells)


def config_of(script, trainer, folder, **overrides):
    module = script("_cell")
    cell = script("_plan").Cell("x", "hanoi", "a", "s", 3, {"trainer": trainer, **overrides}, 6)
    task = script("_task").load("hanoi")
    return module.config_of(module.trainer_class(trainer, folder), task, cell, str(folder))


@pytest.mark.parametrize("trainer", ["STPPOTrainer", "STGRPOTrainer", "GRPOTrainer"])
def test_every_trainer_has_the_same_rollouts_and_steps(script, trainer, tmp_path):
    settings = {"episodes": 64, "mini_batches": 2, "num_iterations": 3, "rollout_staleness": 1}
    config, left_out = config_of(script, trainer, tmp_path, **settings)
    assert config.generation_batch_size == 64
    assert (config.max_steps, config.logging_steps) == (6 * 3 * 2, 3 * 2)
    assert (config.seed, config.learning_rate, config.lr_scheduler_type) == (3, 4e-3, "linear")
    assert left_out == (["rollout_staleness"] if trainer == "GRPOTrainer" else [])
    assert getattr(config, "critic_learning_rate", None) == (1e-3 if "PPO" in trainer else None)
    assert config.num_generations == (1 if trainer == "STPPOTrainer" else 4)


def record_of(arm="a", seed=0, **fields):
    base = {"study": "mine", "task": "t", "arm": arm, "setting": "s", "seed": seed, "overrides": {}}
    base |= {"rollouts": 3, "measure": "success", "evaluation": None, "error": None}
    return {**base, "curves": {"success": [0.5]}, "seconds": 60.0, **fields}


@pytest.mark.parametrize("torn", [0, 1, 20, -1])
def test_a_torn_end_is_not_read_and_goes_with_the_next_writer(script, tmp_path, torn):
    records = script("_records")
    path = tmp_path / "mine.jsonl.gz"
    for seed in (0, 1):
        records.Records(path).add(record_of(seed=seed))
    whole = path.read_bytes()
    end = gzip.compress(b'{"seed": 2}\n')[:torn]
    path.write_bytes(whole + end)
    found = records.Records(path)
    assert [row["seed"] for row in found.rows] == [0, 1]
    with found.writing():
        assert path.read_bytes() == whole
        found.add(record_of(seed=3))
    aside = tmp_path / "mine.jsonl.gz.torn"
    assert (aside.read_bytes() if aside.exists() else b"") == end
    assert [row["seed"] for row in records.Records(path).rows] == [0, 1, 3]
    with gzip.open(path, "rt") as file:
        assert [json.loads(line)["seed"] for line in file] == [0, 1, 3]


def test_a_cell_with_a_record_is_not_missing_and_may_not_change(script, study, tmp_path):
    records = script("_records").Records(tmp_path / "mine.jsonl.gz")
    first, second, *_ = cells = study(STUDY).cells
    records.add(record_of(task="house", setting="slow", seed=3, overrides=first.overrides))
    assert records.missing(cells)[0] == second
    changed = study(STUDY.replace("a = {}", "a = {cliprange = 0.1}")).cells
    with pytest.raises(ValueError, match="overrides"):
        records.missing(changed)


def test_a_run_that_died_counts_as_zero_from_there_on(script):
    died = record_of(curves={"success": [0.75]}, evaluation={"before": 0.5, "after": 0.5}, error="nan")
    (line,) = script("_report").lines([died], base=None)
    assert (line["finals"], line["alls"], line["drops"], line["died"]) == ([0.0], [0.25], [0.75], 1)
    (line,) = script("_report").lines([record_of(curves={}, error="nan")], base=None)
    assert (line["finals"], line["alls"]) == ([0.0], [0.0])


def test_differences_are_paired_by_seed(script):
    def ends(arm, **finals):
        return [
            record_of(arm, int(seed[1:]), evaluation={"before": 0.0, "after": value})
            for seed, value in finals.items()
        ]

    rows = ends("b", s1=0.5, s2=0.75, s3=1.0, s9=0.0) + ends("a", s1=0.25, s2=0.25, s3=0.25)
    base, other = script("_report").lines(rows, base="a")
    assert (base["arm"], "final_difference" in base) == ("a", False)
    found = other["final_difference"]
    assert (found["pairs"], found["mean"]) == (3, 0.5)
    # Differences 0.25, 0.5 and 0.75: t(2) is 4.303, the standard error 0.25 / sqrt(3).
    half = 4.303 * 0.25 / 3**0.5
    assert (found["low"], found["high"]) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-3)
    table = script("_report").markdown([base, other], "a")
    assert "| `b` | 1-3 9 | 0.00 | 0.56 | 0.50 0.75 1.00 0.00 |" in table
    assert "+0.50 (-0.12 to +1.12) [3]" in table
