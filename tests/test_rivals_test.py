"""The second half of the study of rivals: twins are found, who takes part, and the verdict's arithmetic."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

DATA = Path(__file__).parents[1] / "benchmarks/rivals.jsonl.gz"
RATES = {"none": 3e-4, "threshold": 5.5e-4, "extreme": 1e-3, "overlap": 3e-4}
PRESSURES = {"none": "none", "threshold": "epochs", "extreme": "both", "overlap": "overlap"}
SCORES = {"winners": 0.9, "episodes+share": 0.8, "vtrace": 0.7, "kl-0.01": 0.5, "kl-0.03": 0.6}
SCORES |= {"ess": 0.3, "ess-turns": 0.4, "token": 0.2, "turn": 0.5, "share": 0.6}


@pytest.fixture(scope="module")
def study(script):
    return SimpleNamespace(**{name: script(f"_rivals_{name}") for name in ("stages", "test")})


def a_run(final, movement=1.0):
    names = ("episode/success_rate", "study/movement", "study/ess_episodes", "study/ess_turns")
    figures = dict(zip(names, (final, movement, 0.5, 0.5), strict=True))
    tests = [
        {"phase": "test", "update": u, "episode/success_rate": s} for u, s in ((0, 0.2), (4, final))
    ]
    train = [{"phase": "train", "update": u, **figures} for u in range(1, 5)]
    return [tests[0], *train, tests[1] | {"seconds": 1.0, "cpu": 1.0}]


@pytest.fixture
def records(study, tmp_path):
    """A first stage of the corridor and the demo, in which `turn` moves by 4 times the rate's root."""
    stages, book = study.stages, study.stages.Records(tmp_path / "rows.jsonl.gz")
    for pressure, rate, seed in itertools.product(
        ("none", "epochs", "stale", "both"), (1e-4, 3e-4, 5.5e-4, 1e-3), (100, 101, 102)
    ):
        job = stages.trial("pilot", "demo", "token", pressure, (pressure, rate), seed)
        book.add(job, a_run(0.9 if rate <= 3e-4 else 0.1))
    for task in ("corridor", "demo"):
        for job in stages.on_policy(book, task):
            book.add(job, a_run(0.9))
        at = stages.levels(book, task)
        for arm, level, seed in itertools.product(
            SCORES, ("threshold", "extreme"), range(200, 203)
        ):
            job = stages.trial("first", task, arm, level, at[level], seed)
            book.add(job, a_run(SCORES[arm], 4 * at[level][1] ** 0.5 if arm == "turn" else 0.05))
    return book


def test_who_takes_part(study, records):
    assert study.test.finalists(records) == ["winners", "episodes+share"]
    assert study.test.contestants(records) == [
        *("winners", "episodes+share", "kl-0.03", "ess-turns", "share", "token")
    ]
    with pytest.raises(ValueError, match="no two survivors"):
        study.test.finalists(SimpleNamespace(of=lambda *_: []))


def test_twins_move_as_far_as_the_rival(study, records):
    """The search sees only movements; here they follow a law that it does not know."""
    for task in ("corridor", "demo"):
        rounds = 0
        while jobs := study.test.tuning(records, task):
            rounds += 1
            assert {job.cell.seed for job in jobs} == {200, 201, 202}
            assert len({job.key for job in jobs} - records.keys) == len(jobs)
            for job in jobs:
                assert job.arm == "turn"
                records.add(job, a_run(0.5, 4 * job.cell.learning_rate**0.5))
        assert 0 < rounds <= 4
        rate, settled = study.test.twin(records, task, "winners", "extreme")
        assert settled
        assert 4 * rate**0.5 == pytest.approx(0.05, rel=0.05)


def test_a_search_that_cannot_end_gives_up(study, records):
    rounds = 0
    while jobs := study.test.tuning(records, "corridor"):
        rounds += 1
        for job in jobs:
            records.add(job, a_run(0.5, 9.0))
    assert rounds <= study.test.TRIES


def test_confirmation_comes_first_and_twins_keep_their_seeds(study, records):
    while jobs := study.test.tuning(records, "corridor"):
        for job in jobs:
            records.add(job, a_run(0.5, 4 * job.cell.learning_rate**0.5))
    jobs = study.test.test(records, "corridor")
    assert [job.arm for job in jobs[:20:10]] == ["winners", "turn"]
    assert [job.cell.seed for job in jobs[:10]] == [job.cell.seed for job in jobs[10:20]]
    used = {seed for record in records.rows for seed in [int(record["key"][-1])]}
    assert not used & {job.cell.seed for job in jobs}
    quiet = [job for job in jobs if (job.arm, job.level) == ("token", "overlap")]
    assert len(quiet) == 20
    assert len({job.key for job in jobs}) == len(jobs)
    sweep = study.test.sweep(records, "corridor")
    assert len({job.cell.learning_rate for job in sweep}) == 5
    assert not {job.cell.seed for job in sweep} & {job.cell.seed for job in jobs}
    assert study.test.sweep(records, "demo") == []


def test_sign_flips_and_holm_by_hand(study):
    # Of the 8 signs of (1, 2, 3) two have a sum of 6 in size; of (1, 1, -1) all reach 1.
    assert study.test.sign_flip([1.0, 2.0, 3.0]) == pytest.approx(0.25)
    assert study.test.sign_flip([1.0, 1.0, -1.0]) == 1.0
    assert study.test.sign_flip([0.1] * 10) == pytest.approx(2 / 1024)
    assert study.test.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert study.test.holm([0.9, 0.8]) == [1.0, 1.0]


def test_the_verdict_pairs_seeds(study, records):
    while jobs := study.test.tuning(records, "corridor"):
        for job in jobs:
            records.add(job, a_run(0.5, 4 * job.cell.learning_rate**0.5))
    rate = study.test.twin(records, "corridor", "winners", "extreme")[0]
    for job in study.test.test(records, "corridor"):
        better = 0.2 + job.cell.seed % 10 / 100 if job.arm == "winners" else 0.0
        records.add(job, a_run(0.5 + better))
    verdict = study.test.verdict(records, ["corridor"])
    line = verdict["twins"]["corridor extreme"]
    assert (line["rate"], line["seeds"]) == (rate, 10)
    assert line["difference"] == pytest.approx(0.245)
    assert line["low"] < 0.245 < line["high"]
    # Two comparisons, both with the smallest p-value that ten seeds can have.
    assert (line["p"], line["holm"]) == pytest.approx((2 / 1024, 4 / 1024))
    assert verdict["token"]["corridor none"]["seeds"] == 20
    cell = next(c for c in verdict["cells"] if (c["arm"], c["level"]) == ("token", "extreme"))
    assert (cell["runs"], cell["final"], cell["collapsed"]) == (10, pytest.approx(0.5), 0)


def test_the_recorded_runs_have_a_verdict(study):
    """A level whose twin has not been run is left out; one counts in Holm's family with all its seeds."""
    stages, recorded = study.stages, study.stages.Records(DATA)
    tested = [task for task in stages.TASKS if recorded.of("test", task)]
    verdict = study.test.verdict(recorded, tested)
    assert verdict["winner"] == "winners+share-logits"
    family = [line for line in verdict["twins"].values() if "holm" in line]
    assert len(family) >= 4
    assert all(line["seeds"] == 10 for line in family)


def test_a_sweep_is_judged_over_the_logarithm_of_the_rate(study, records):
    for job in study.test.sweep(records, "corridor"):
        small = job.cell.learning_rate <= 1e-3
        records.add(job, a_run(0.9 if job.arm == "share" or small else 0.0))
    swept = study.test.swept(records)
    assert swept["share"]["area"] == pytest.approx(0.9)
    assert swept["token"]["best"] in (1e-4, 3e-4, 5.5e-4, 1e-3)
    # Level for one decade of log10(30), then down to nothing in a straight line.
    rest = 1 - 1 / math.log10(30)
    assert swept["token"]["area"] == pytest.approx(0.9 * (1 / math.log10(30) + rest / 2))
