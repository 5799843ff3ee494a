"""The study of rivals keeps its books: names, records, levels, who goes on."""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def study(script):
    return SimpleNamespace(**{name: script(f"_rivals_{name}") for name in ("stages", "trainer")})


def test_names_say_what_is_set(study):
    parts_of, settings_of = study.trainer.parts_of, study.trainer.settings_of
    assert parts_of("ess-0.55+tis") == {"ess": 0.55, "tis": None}
    assert settings_of("target-kl-0.03")["target_kl"] == 0.03
    with pytest.raises(ValueError, match="no \\['shares'\\]"):
        parts_of("turns+shares")
    for arm in (*study.stages.REFERENCES, *study.stages.CANDIDATES):
        parts_of(arm)


def rows_of_a_run(final):
    curve = [{"phase": "train", "update": u, "episode/success_rate": 0.9} for u in range(1, 5)]
    tests = [
        {"phase": "test", "update": u, "episode/success_rate": s} for u, s in ((0, 0.2), (4, final))
    ]
    return [tests[0], *curve, tests[1] | {"seconds": 1.0, "cpu": 1.0}]


def records_of(study, path, finals):
    records = study.stages.Records(path)
    for arm, final in finals.items():
        for task in study.stages.FIRST_TASKS:
            for level in study.stages.LEVELS:
                pressure = {"threshold": "epochs", "extreme": "both"}[level]
                job = study.stages.trial("first", task, arm, level, (pressure, 1e-3), 200)
                records.add(job, rows_of_a_run(final))
    return records


def run_pilots(stages, records, task, final):
    """All rounds; returns pressure, rate and seed of the runs, in their order."""
    done = []
    while jobs := stages.pilot(records, task):
        assert {job.task for job in jobs} == {task}
        for job in jobs:
            records.add(job, rows_of_a_run(final(job.cell)))
            done.append((job.cell.pressure, job.cell.learning_rate, job.cell.seed))
    return done


def test_what_was_cut_off_is_run_again(study, tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    records = records_of(study, path, {"share": 0.5, "turn": 0.4})
    assert len(records.keys) == 8
    with gzip.open(path, "rt") as file:
        assert [json.loads(line)["test"] for line in file] == [r["test"] for r in records.rows]
    path.write_bytes(path.read_bytes()[:-5])
    again = study.stages.Records(path)
    assert len(again.keys) == 7
    again.add(
        study.stages.trial("first", "demo", "turn", "extreme", ("both", 1e-3), 200),
        rows_of_a_run(0.1),
    )
    assert study.stages.Records(path).rows == again.rows


def test_who_goes_on(study, tmp_path):
    finals = {"token": 0.95, "episodes+share": 0.8, "episodes+share-logits": 0.805, "m2po": 0.3}
    finals |= {"vtrace+share": 0.7, "kl-0.01": 0.695, "kl-0.03": 0.699, "target-kl-0.01": 0.6}
    records = records_of(study, tmp_path / "rows.jsonl.gz", finals)
    table = study.stages.table_of(records)
    assert table[0] == {**table[0], "arm": "token", "worst": 0.95, "collapsed": 0, "runs": 4}
    job = study.stages.trial("first", "demo", "sapo", "extreme", ("both", 1e-3), 200)
    records.add(job, rows_of_a_run(0.99))
    # The cheaper of two that tie, one of a family, no reference, nobody who lacks runs.
    expected = ["episodes+share-logits", "kl-0.03", "vtrace+share"]
    assert sorted(study.stages.survivors(study.stages.table_of(records))) == sorted(expected)


def test_levels_of_the_corridor_are_those_of_the_stability_study(study, tmp_path):
    stages = study.stages
    records = stages.Records(tmp_path / "rows.jsonl.gz")
    expected = {"none": ("none", 3e-4), "threshold": ("epochs", 5.5e-4), "extreme": ("both", 1e-3)}
    expected["overlap"] = ("overlap", 3e-4)
    assert stages.levels(records, "corridor") == expected
    assert stages.pilot(records, "corridor") == []
    for job in stages.on_policy(records, "corridor"):
        rows = rows_of_a_run(0.9)
        records.add(
            job, [row | {"study/ess_episodes": 0.8, "study/ess_turns": 0.9} for row in rows]
        )
    jobs = stages.first(records, "corridor")
    assert (
        len({job.key for job in jobs})
        == len(jobs)
        == 6 * len((*stages.REFERENCES, *stages.CANDIDATES))
    )
    assert {job.base for job in jobs if job.arm == "ess"} == {0.8}
    assert [job.cell.seed for job in jobs] == sorted(job.cell.seed for job in jobs)
    run_pilots(stages, records, "demo", lambda cell: 0.1 if cell.pressure == "stale" else 0.8)
    assert stages.levels(records, "demo")["threshold"][0] == "stale"
    for job in stages.on_policy(records, "demo"):
        rows = rows_of_a_run(0.9)
        records.add(
            job, [row | {"study/ess_episodes": 0.8, "study/ess_turns": 0.9} for row in rows]
        )
    job = stages.trial("first", "corridor", "m2po", "extreme", ("both", 1e-3), 200)
    records.add(job, rows_of_a_run(0.9))
    arms = [job.arm for job in stages.first(records, "demo")]
    # Who did best on the corridor, and the references.
    assert arms[:3] == ["m2po", "token", "turn"]
    assert len(set(arms)) == stages.BEST + len(stages.REFERENCES)


def test_the_third_task_has_pilots_of_its_own_and_no_part_in_the_first_stage(study, tmp_path):
    stages = study.stages
    assert stages.TASKS == ("corridor", "demo", "textworld")
    records = stages.Records(tmp_path / "rows.jsonl.gz")

    def final(cell):
        best = 0.9 if cell.learning_rate == 5.5e-4 else 0.8
        return 0.1 if cell.pressure == "stale" else best

    cells = run_pilots(stages, records, "textworld", final)
    # Four rates without pressure, then from the best upward until half collapse.
    tried = [("none", 1e-4), ("none", 3e-4), ("none", 5.5e-4), ("none", 1e-3)]
    tried += [("epochs", 5.5e-4), ("stale", 5.5e-4)]
    assert cells == [(*at, seed) for at in tried for seed in (100, 101, 102)]
    levels = stages.levels(records, "textworld")
    assert levels["none"] == ("none", 5.5e-4)
    assert levels["overlap"] == ("overlap", 5.5e-4)
    assert levels["threshold"] == ("stale", 5.5e-4)
    assert len(stages.on_policy(records, "textworld")) == 3
    assert stages.first(records, "textworld") == stages.reproduce(records, "textworld") == []
    assert stages.table_of(records) == []
