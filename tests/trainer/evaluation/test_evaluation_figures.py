"""What evaluation reports is summed over all episodes and divided once, with intervals over rows."""

import math
import statistics

import pytest

from tests.kit.builders import build, prompts
from tests.kit.evaluation_run import CASES, ROWS, evaluated, figures_of
from tests.kit.launch import on_two_processes
from trl_stppo.statistics import wilson_interval
from trl_stppo.trainer.evaluation.metrics import EvaluationRun
from trl_stppo.trainer.loop.log import PlayedEpisode


def test_figures_are_sums_divided_once(tmp_path):
    """Five rows in batches of four: a mean of the batches' means would be another number."""

    def paid(prompts, completions, pay, log_metric, **kwargs):
        log_metric("pay", statistics.fmean(pay))
        return [None if p == 3.0 else p for p in pay]

    pays = [0.0, 1.0, 2.0, 3.0, 40.0]
    trainer = build(
        tmp_path,
        arguments={
            "reward_funcs": paid,
            "train_dataset": prompts(8, pay=[0.0] * 8),
            "eval_dataset": prompts(5, pay=pays),
        },
        per_device_eval_batch_size=4,
    )
    metrics = trainer.evaluate()
    assert metrics["eval_episodes"] == metrics["eval_rows"] == 5
    known = [0.0, 1.0, 2.0, 40.0]
    for name in ("rewards/paid/mean", "reward"):
        assert metrics[f"eval_{name}"] == pytest.approx(statistics.fmean(known))
    assert metrics["eval_reward_std"] == pytest.approx(statistics.stdev(known))
    assert metrics["eval_pay"] == pytest.approx(statistics.fmean(pays))
    scores = [0.0, 1.0, 2.0, 0.0, 40.0]
    assert metrics["eval_episode/score"] == pytest.approx(statistics.fmean(scores))
    half = 1.959964 * statistics.stdev(scores) / math.sqrt(5)
    assert metrics["eval_episode/score_high"] - metrics["eval_episode/score"] == pytest.approx(half)
    assert metrics["eval_turns/mean"] == 1.0
    assert "eval_episode/success_rate" not in metrics


def test_a_text_environments_figures_are_those_of_a_plain_loop(tmp_path):
    metrics, trainer = evaluated(tmp_path, "text", num_generations_eval=1)
    facts = trainer.facts
    wins = [f.success for f in facts]
    assert 0 < sum(wins) < 5, "the case should be interesting"
    assert metrics["eval_episode/success_rate"] == sum(wins) / 5
    low, high = wilson_interval(sum(wins), 5)
    assert metrics["eval_episode/success_rate_low"] == pytest.approx(low)
    assert metrics["eval_episode/success_rate_high"] == pytest.approx(high)
    valid = [flag for f in facts for flag in f.valid_actions]
    assert metrics["eval_turns/valid_action_rate"] == sum(valid) / len(valid)
    turns = [f.turns for f in facts]
    assert metrics["eval_turns/mean"] == sum(turns) / 5
    assert metrics["eval_turns/max"] == max(turns)
    assert metrics["eval_turns/tokens_mean"] == sum(f.tokens for f in facts) / sum(turns)
    assert metrics["eval_stop_reason/terminated"] == 1.0
    assert metrics["eval_stop_reason/env_error"] == 0.0


def episode(name, score=0.0, **facts):
    defaults = {"success": None, "turns": 1, "tokens": 4, "ended": True}
    return PlayedEpisode(name, score, rewards=(score,), reward=score, **{**defaults, **facts})


def test_repetitions_widen_the_interval():
    """Two rows of four equal episodes each say no more than two episodes."""
    run = EvaluationRun(["paid"])
    run.episodes = [episode((i // 4, i % 4), float(i // 4), success=i >= 4) for i in range(8)]
    run.episodes += [episode((i, 4), 0.5) for i in (0, 1)]
    figures = run.figures(lambda parts: parts)
    assert figures["episode/success_rate"] == 0.5
    assert figures["episode/success_known"] == 0.8
    low, high = wilson_interval(1, 2)
    assert figures["episode/success_rate_low"] == pytest.approx(low)
    assert figures["episode/success_rate_high"] == pytest.approx(high)
    assert figures["episode/score"] == 0.5
    assert figures["episode/score_high"] - 0.5 == pytest.approx(1.959964 * 0.4)
    assert figures["episodes"] == 10
    assert figures["rows"] == 2


def test_an_agent_that_is_never_judged_has_failed_where_others_are_judged():
    """Searching until the turns are over must not raise the rate."""
    run = EvaluationRun(["paid"])
    judge, silent = {"env_type": "Judge"}, {"env_type": "Silent"}
    run.episodes = [
        episode((0, 0), success=True, stop_reason="terminated", **judge),
        episode((1, 0), success=False, stop_reason="terminated", **judge),
        episode((2, 0), stop_reason="max_turns", **judge),
        episode((3, 0), stop_reason="token_budget", **judge),
        episode((4, 0), stop_reason="env_error", **judge),
        episode((5, 0), stop_reason="max_turns", **silent),
    ]
    figures = run.figures(lambda parts: parts)
    assert figures["episode/success_rate"] == 1 / 4
    assert figures["episode/success_known"] == 4 / 6


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The results of both ranks."""
    folder = tmp_path_factory.mktemp("two")
    return on_two_processes("tests.kit.evaluation_run", folder, weights_only=False)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_two_processes_report_what_one_reports(case, ranks, tmp_path):
    one, trainer = evaluated(tmp_path, case, per_device_eval_batch_size=3)
    played = [fact for rank in ranks for fact in rank[case][1]]
    assert sorted(played, key=lambda fact: fact.name) == trainer.facts
    assert len(played) == (2 * ROWS if case == "text" else ROWS)
    for rank in ranks:
        assert figures_of(rank[case][0]) == figures_of(one)


@pytest.mark.long
def test_both_processes_report_the_same_in_the_middle_of_a_training(ranks):
    first, second = (rank["while training"] for rank in ranks)
    assert first == second
    assert [figures["eval_episodes"] for figures in first] == [2 * ROWS]
