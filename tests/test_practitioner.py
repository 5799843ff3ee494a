"""The bookkeeping of the practitioner's study: who is run, at what budget, and what a claim comes to."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def study(script):
    return script("practitioner")


@pytest.fixture(scope="module")
def report(script):
    return script("_practitioner_report")


@pytest.fixture
def records(study, tmp_path):
    return study.Records(tmp_path / "runs.jsonl.gz")


def add(records, play, *tests, rollouts=(0.5,)):
    rows = [{"phase": "test", "update": 0, "episode/success_rate": test} for test in tests]
    rows[1:1] = [{"phase": "train", "episode/success_rate": success} for success in rollouts]
    rows[-1] |= {"seconds": 1.0, "cpu": 1.0}
    records.add(play, rows)


def claim_of(outcome, text):
    (line,) = (line for line in outcome["claims"] if line["claim"].startswith(text))
    return line


def test_questions_share_the_runs_that_they_have_in_common(study, records):
    seeds = study.SEEDS[0]
    for play, success in zip(study.pilot(), (0.3, 0.6, 0.5), strict=True):
        add(records, play, 0.3, success)
    plays = {
        name: {play.key for play in question(records, seeds)}
        for name, question in study.QUESTIONS.items()
    }
    assert [len(plays[name]) for name in ("rewards", "worlds", "budget")] == [20, 4, 10]
    shared = {study.Play(seed=seed).key for seed in seeds}
    assert plays["rewards"] & plays["worlds"] == plays["rewards"] & plays["budget"] == shared
    assert {key[4] for key in plays["budget"] - shared} == {"0.001"}  # the pilot's best
    assert study.budget(study.Records(records.path.with_name("none.gz")), seeds) == []


def test_a_demonstration_costs_ten_episodes_of_the_budget(study):
    updates = [study.Play(demonstrations=n).updates for n in (0, 16, 32, 48, 64)]
    assert updates == [20, 15, 10, 5, 0]


@pytest.mark.parametrize("method", ["ppo", "st-ppo", "grpo", "rloo", "rebn"])
def test_each_method_is_trained_as_its_variant(study, script, method, tmp_path):
    play, config_of = study.Play(method=method), script("_stability_run").config_of
    task = script("_task").Task(tmp_path, None, None, None, {"max_turns": 6}, 32, 20)
    config = config_of(play.cell, task, str(tmp_path), **study.METHODS[method])
    expected = ("turn", ["share"]) if method == "st-ppo" else ("token", [])
    assert (config.importance_sampling_level, config.stabilizers) == expected
    if "ppo" not in method:
        assert config.advantage_estimator == {
            "grpo": "group",
            "rloo": "leave_one_out",
            "rebn": "batch",
        }.get(method)
        assert config.num_generations == (1 if method == "rebn" else 4)


@pytest.mark.parametrize(
    ("differences", "bar", "verdict"),
    [
        ((0.1, 0.2, 0.1), 0.0, "agrees"),
        ((-0.1, -0.2, -0.1), 0.0, "disagrees"),
        ((-0.1, 0.2, 0.1), 0.0, "open"),
        ((-0.02, 0.0, -0.01), -0.05, "agrees"),
        ((0.1,), 0.0, "not run"),
        ((), 0.0, "not run"),
    ],
)
def test_a_claim_holds_where_the_interval_lies_on_its_side(report, differences, bar, verdict):
    assert report.claim("x", dict(enumerate(differences)), bar)["verdict"] == verdict


def test_differences_are_taken_seed_by_seed(study, report, records):
    for seed, (sparse, dense) in enumerate(((0.5, 0.7), (0.6, 0.7), (0.9, None))):
        add(records, study.Play(seed=seed), 0.3, 0.05, 0.1, sparse)
        if dense is not None:
            add(records, study.Play(seed=seed, reward="dense"), 0.3, dense, rollouts=(0.2, 0.4))
        add(records, study.Play("hard", seed=seed), 0.04, 0.3, 0.6, 0.3)
    outcome = report.report(records)
    line = claim_of(outcome, "dense rewards are better in the end with ppo")
    assert (line["seeds"], line["difference"]) == (2, pytest.approx(0.15))
    assert line["verdict"] == "agrees"
    line = claim_of(outcome, "dense rewards are faster with ppo")
    assert line["difference"] == pytest.approx(-0.2)
    # Of the easy world's agent in the hard one, before and after; then the hard one's.
    line = claim_of(outcome, "training on the easy world helps")
    assert line["difference"] == pytest.approx(0.1 - 0.05)
    line = claim_of(outcome, "training on the easy world does no worse")
    assert (line["difference"], line["verdict"]) == (pytest.approx(0.1 - 0.3), "disagrees")
    assert claim_of(outcome, "ppo and grpo gain more")["verdict"] == "not run"


def test_the_picture_is_drawn_of_what_is_there(study, script, report, records, tmp_path):
    pytest.importorskip("matplotlib")
    for seed in range(2):
        add(records, study.Play(seed=seed), 0.3, 0.05, 0.1, 0.7)
        add(records, study.Play(seed=seed, demonstrations=64, sft_rate=1e-3), 0.3, 0.6, rollouts=())
    script("_practitioner_figure").draw(
        report.report(records)["table"], records.rows, tmp_path / "a.png"
    )
    assert (tmp_path / "a.png").stat().st_size > 10_000
