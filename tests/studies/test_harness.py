"""The studies' harness: cells of a file, records that survive kills, workers, the report's numbers."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.script_kit import ROOT
from tests.kit.waiting import wait_until

STUDIES = ROOT / "benchmarks" / "studies"
FILES = sorted(STUDIES.glob("*.toml"))
RECORDED = sorted((STUDIES / "records").glob("*.jsonl.gz"))

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


# ---------------------------------------------------------------------------------- cells


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


# --------------------------------------------------------------------------- configurations


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


# ---------------------------------------------------------------------------------- records


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


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name)
def test_the_recorded_runs_read_to_the_last_line(path, script):
    with gzip.open(path, "rt") as file:
        lines = sum(1 for _ in file)
    rows = script("_records").Records(path).rows
    assert len(rows) == lines == len({(r["study"], *script("_records").key_of(r)) for r in rows})
    report = script("_report")
    found = report.lines(rows, base=rows[0]["arm"])
    assert sum(len(line["seeds"]) for line in found) == lines
    assert report.markdown(found, rows[0]["arm"]).count("\n") > len(found)


# ----------------------------------------------------------------------------------- runner

# Reads a job as the harness's own worker does, and does what its arm says.
WORKER = """
import json, os, pathlib, sys, time
job = json.loads(sys.stdin.readline())
cell, folder = job["cell"], pathlib.Path(job["folder"])
if cell["arm"] in ("waits", "deaf") and not (folder / "go").exists():
    (folder / "waiting").write_text(str(os.getpid()))
    sys.stdin.read() if cell["arm"] == "waits" else time.sleep(600)
    sys.exit("nobody waits")
if cell["arm"] == "slow":
    time.sleep(0.3)
if cell["arm"] == "dies":
    sys.exit("no memory")
row = {**cell, "measure": "success", "evaluation": None, "error": None, "seconds": 2.0}
row |= {"curves": {"success": [0.5]}, "rollouts": 1, "threads": os.environ["OMP_NUM_THREADS"]}
pathlib.Path(job["result"]).write_text(json.dumps(row))
"""
RUNNER = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from pathlib import Path
from _plan import read
from _records import Records
from _runner import Options, run_all
study, folder = read(Path(sys.argv[3])), Path(sys.argv[4])
records = Records(folder / "mine.jsonl.gz")
options = Options(folder, 2, command=(sys.executable, "-c", (folder / "worker.py").read_text()))
with records.writing():
    print(run_all(study, records.missing(study.cells), records, options))
"""
ARMS = """
tasks = ["t"]
seeds = ["0-1"]
[arms]
quick = {}
waits = {}
"""


@pytest.fixture
def begun(tmp_path, study, request):
    """A runner in a process of its own, whose workers of the arm `waits`, or of another one, wait."""
    study(ARMS.replace("waits", getattr(request, "param", "waits")))
    (tmp_path / "worker.py").write_text(WORKER)
    paths = [str(STUDIES), str(ROOT), str(tmp_path / "mine.toml"), str(tmp_path)]
    process = subprocess.Popen([sys.executable, "-c", RUNNER, *paths], stdout=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def test_a_killed_runner_ends_its_workers_and_goes_on_where_it_was(
    begun, script, study, tmp_path, monkeypatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    records = script("_records")
    path = tmp_path / "mine.jsonl.gz"
    assert wait_until(
        lambda: (tmp_path / "waiting").is_file() and (tmp_path / "waiting").read_text()
    )
    assert wait_until(lambda: len(records.Records(path).rows) == 2)
    begun.kill()
    begun.wait()
    assert wait_until(lambda: not running(int((tmp_path / "waiting").read_text())))
    with open(path, "ab") as file:
        file.write(b"torn")

    (tmp_path / "go").touch()
    runner, mine, again = script("_runner"), study(ARMS), records.Records(path)
    options = runner.Options(tmp_path, 2, command=(sys.executable, "-c", WORKER))
    with again.writing():
        outcome = runner.run_all(mine, again.missing(mine.cells), again, options)
    assert outcome == {"ran": 2, "left": 0, "failed": []}
    ran = {(row["arm"], row["seed"]) for row in records.Records(path).rows}
    assert ran == {(arm, seed) for arm in ("quick", "waits") for seed in (0, 1)}
    assert {row["threads"] for row in again.rows} == {"1"}


def running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# ----------------------------------------------------------------------------------- report


def test_a_run_that_died_counts_as_zero_from_there_on(script):
    died = record_of(
        curves={"success": [0.75]}, evaluation={"before": 0.5, "after": 0.5}, error="nan"
    )
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
