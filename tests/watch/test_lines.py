"""The lines of a training: what it is, one per rollout batch, one per evaluation, and no others."""

import io
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from tests.kit.scripted import numbered_rows, scripted_trainer
from trl_stppo.trainer import display
from trl_stppo.watch import ProgressLines
from trl_stppo.watch.lines import COLUMNS, say, steps_per_round
from trl_stppo.watch.runs import NOTHING, duration, number, shown

CONSOLE = Path(__file__).parents[1] / "fixtures" / "console.txt"
# Two optimizer steps a round, three rounds of eight episodes.
SETTINGS = {"max_steps": 6, "num_ppo_epochs": 2, "rows": 32}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FailAtStep(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self.step:
            raise RuntimeError("broken on purpose")


def trained(tmp_path, capsys, **settings) -> tuple[list[str], str, list[dict]]:
    """Lines on stdout, all of stderr, and what was logged."""
    trainer, _ = scripted_trainer(tmp_path, **{**SETTINGS, **settings})
    capsys.readouterr()
    trainer.train()
    out, err = capsys.readouterr()
    return out.splitlines(), err, trainer.state.log_history


def first_words(lines: list[str], start: str = "rollout") -> list[str]:
    return [" ".join(line.split()[:2]) for line in lines if line.startswith(start)]


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, "0.5", True])
def test_what_is_no_figure_is_shown_as_a_dash(value):
    assert shown(number(value)) == NOTHING


def test_figures_and_durations_are_shown_in_their_format():
    assert (shown(0.25), shown(1234.5, ",.0f"), shown(-1e-9)) == ("0.250", "1,234", "0.000")
    assert (shown(-0.25), shown(-1e-9, ".1e")) == ("-0.250", "-1.0e-09")
    seconds = (None, 0.4, 59.4, 59.6, 3725, -3)
    assert [*map(duration, seconds)] == [NOTHING, "0 s", "59 s", "1:00", "1:02:05", "0 s"]


def test_steps_of_a_round_follow_from_the_settings():
    sizes = {"num_iterations": 3, "steps_per_generation": 8, "gradient_accumulation_steps": 2}
    assert steps_per_round(SimpleNamespace(**sizes)) == 12
    assert steps_per_round(SimpleNamespace(gradient_accumulation_steps=4)) == 1


def test_a_line_fits_into_80_columns_and_new_columns_get_a_heading(capsys):
    judged = {column.metric: 0.123 for column in COLUMNS}
    unjudged = {"episode/score": 12.5, "turns/mean": 3.0}
    two_rollouts([unjudged, judged], max_steps=1000)
    *_, first, second = [x for x in capsys.readouterr().out.splitlines() if x.endswith("left")]
    assert first.split() == ["score", "turns", "time", "left"]
    assert second.split() == [
        *(column.label for column in COLUMNS if column.label != "score"),
        *("time", "left"),
    ]
    assert len(second) <= 80


def test_lines_come_with_the_log_that_completes_a_round(tmp_path, capsys):
    lines, _, history = trained(tmp_path, capsys, logging_steps=3)
    assert first_words(lines) == ["rollout 1/3", "rollout 3/3"]
    assert len([e for e in history if "loss" in e]) == 2


def test_the_console_is_as_recorded(tmp_path, capsys, monkeypatch):
    """Every figure is a `#` there, apart from the numbers of rollouts, steps and seconds."""
    clock = Clock()
    monkeypatch.setattr("trl_stppo.watch.lines.time.monotonic", clock)
    trainer, _ = scripted_trainer(
        tmp_path, eval_dataset=numbered_rows(4), eval_strategy="steps", eval_steps=4, **SETTINGS
    )
    (lines,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, ProgressLines))
    on_evaluate = lines.on_evaluate

    def step(*given, **named):
        clock.now += 5.0

    def evaluated(args, state, control, metrics=None, **named):
        clock.now += 30.0
        on_evaluate(args, state, control, metrics={**metrics, "eval_runtime": 30.0}, **named)

    lines.on_step_end, lines.on_evaluate = step, evaluated
    capsys.readouterr()
    trainer.evaluate()
    trainer.train()
    out, err = capsys.readouterr()
    figures = re.sub(r"-?\d+\.\d+(e-\d+)?", "#", out.replace(str(tmp_path), "FOLDER"))
    assert re.sub(" +", " ", figures) == CONSOLE.read_text()
    assert "it/s" not in err


def test_a_resumed_run_goes_on_with_its_next_line(tmp_path, capsys):
    settings = {**SETTINGS, "save_strategy": "steps", "save_steps": 2}
    trainer, _ = scripted_trainer(tmp_path, callbacks=[FailAtStep(3)], **settings)
    with pytest.raises(RuntimeError):
        trainer.train()
    trainer, _ = scripted_trainer(tmp_path, **settings)
    capsys.readouterr()
    trainer.train(resume_from_checkpoint=True)
    lines = capsys.readouterr().out.splitlines()
    assert "resumed after rollout 1/3, step 2" in lines
    assert first_words(lines) == ["rollout 2/3", "rollout 3/3"]


def state_of(step: int, history: list[dict], main: bool, max_steps: int) -> SimpleNamespace:
    return SimpleNamespace(
        global_step=step, max_steps=max_steps, log_history=history, logging_steps=1,
        is_world_process_zero=main,
    )  # fmt: skip


def two_rollouts(
    logs: list[dict], main: bool = True, max_steps: int = 4
) -> tuple[ProgressLines, SimpleNamespace, ...]:
    """A training of which these are the log entries."""
    lines = ProgressLines()
    args = SimpleNamespace(
        gradient_accumulation_steps=1,
        output_dir="runs/a",
        logging_strategy="steps",
        eval_strategy="no",
    )
    lines.on_train_begin(args, state_of(0, [], main, max_steps), None)
    for step in range(1, len(logs) + 1):
        state = state_of(step, logs[:step], main, max_steps)
        lines.on_log(args, state, None)
    return lines, args, state


@pytest.mark.parametrize("main", [True, False])
def test_only_the_main_process_prints(main, capsys):
    entry = {"policy/clip_fraction": 0.5, "guard/kl_stopped_steps": 2}
    lines, args, state = two_rollouts([entry, entry], main)
    lines.on_evaluate(args, state, None, metrics={"eval_runtime": 1.0})
    lines.on_train_end(args, state, None)
    printed = capsys.readouterr().out
    if not main:
        assert printed == ""
        return
    assert printed.count("! 2 optimizer steps left out beyond target_kl\n") == 1, "a running total"
    assert printed.splitlines()[-1].startswith("stopped after rollout 2/4, step 2/4, in ")


def rollout_of(success: float, cut_off: float) -> dict:
    return {
        "policy/clip_fraction": 0.5, "episode/success_rate": success,
        "stop_reason/token_budget": cut_off, "stop_reason/max_turns": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("success", "cut_off", "warnings"), [(0.0, 1.0, 1), (0.1, 1.0, 0), (0.0, 0.5, 1), (0.0, 0.2, 0)]
)
def test_rollouts_that_are_cut_off_unsolved_are_named(success, cut_off, warnings, capsys):
    two_rollouts([rollout_of(success, cut_off)] * 2)
    assert capsys.readouterr().out.count("max_completion_length") == warnings


@pytest.mark.parametrize(("scores", "said"), [
    ([0.8, *[-0.2] * 5], 1),
    ([-1.0, 0.02, *[-0.01] * 5], 0),
    ([-0.1, *[-0.9] * 5], 0),
])  # fmt: skip
def test_the_end_names_a_score_that_is_lost(scores, said, capsys):
    end, args, state = two_rollouts([{"episode/score": score} for score in scores])
    end.on_train_end(args, state, None)
    assert capsys.readouterr().out.count("! score ") == said


def fruitless_rollout(success=0.0, spread=0.0, **more) -> dict:
    """Metrics of a rollout; `spread` is that of its advantages."""
    return {
        **{"policy/clip_fraction": 0.0, "episode/score": 0.0, "episode/success_rate": success},
        **{"advantage/std": spread, "reward_std": spread, "turns/valid_action_rate": 0.25},
        **{"stop_reason/token_budget": 0.2, "stop_reason/max_turns": 0.7, **more},
    }


NO_SUCCESS, NO_SPREAD = "no episode succeeded", "nothing could be learned"


@pytest.mark.parametrize(("rollouts", "said"), [
    ([fruitless_rollout()] * 2, {NO_SUCCESS, NO_SPREAD}),
    ([fruitless_rollout(spread=0.1)] * 2, {NO_SUCCESS}),
    ([fruitless_rollout(success=1.0)] * 2, {NO_SPREAD}),
    ([fruitless_rollout(success=None, reward_std=0.1)] * 2, {NO_SPREAD}),
    ([{"reward_std": 0.0, "advantage/std": 0.1}] * 2, {NO_SPREAD}),
    ([fruitless_rollout(), fruitless_rollout(success=0.1, spread=0.1)], set()),
    ([{"policy/clip_fraction": 0.0}] * 2, set()),
])  # fmt: skip
def test_the_end_says_that_nothing_was_learned_and_where_to_look(rollouts, said, capsys, caplog):
    end, args, state = two_rollouts(rollouts)
    assert "valid" not in capsys.readouterr().out, "two rollouts may be chance"
    with caplog.at_level("INFO"):
        end.on_train_end(args, state, None)
    lines = [line for line in capsys.readouterr().out.splitlines() if line[0] == "!"]
    assert len(lines) == bool(said)
    assert {words for words in (NO_SUCCESS, NO_SPREAD) if words in "".join(lines)} == said
    logged = [record.getMessage() for record in caplog.records]
    assert [line[2 : 2 + len(text)] for line, text in zip(lines, logged, strict=True)] == logged


@pytest.mark.parametrize(("spreads", "times"), [
    ([0.0] * 5, 1), ([0.0, 0.0, 0.1, 0.0], 0), ([0.1, *[0.0] * 4], 0),
])  # fmt: skip
def test_the_first_rollouts_without_any_spread_are_named_once(spreads, times, capsys):
    history = [fruitless_rollout(spread=spread) for spread in spreads]
    lines, args, state = two_rollouts(history, max_steps=9)
    lines.on_log(args, state, None)
    assert capsys.readouterr().out.count(NO_SPREAD) == times
    resumed = ProgressLines()
    resumed.on_train_begin(args, state, None)
    resumed.on_log(args, state_of(9, [*history, history[-1]], True, 9), None)
    assert NO_SPREAD not in capsys.readouterr().out


def test_the_best_rollout_is_marked_and_a_resumed_run_knows_it(capsys):
    history = [rollout_of(success, 0.0) for success in (0.5, 0.4, 0.6)]
    lines, args, _ = two_rollouts(history)
    printed = capsys.readouterr().out
    assert [line.split()[2] for line in printed.splitlines() if "rollout" in line[:8]] == [
        "0.500", "0.400", "0.600*",
    ]  # fmt: skip
    lines = ProgressLines()
    lines.on_train_begin(args, state_of(3, history, True, 4), None)
    lines.on_log(args, state_of(4, [*history, rollout_of(0.55, 0.0)], True, 4), None)
    assert "0.550 " in capsys.readouterr().out


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(5, "the terminal has gone")])
def test_a_terminal_that_has_gone_does_not_end_a_training(error, tmp_path, monkeypatch):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    trainer, _ = scripted_trainer(tmp_path, **SETTINGS)
    monkeypatch.setattr(sys, "stdout", Gone())
    trainer.train()
    assert trainer.state.global_step == 6


def test_what_stdout_cannot_encode_is_replaced(monkeypatch):
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    say("‖C‖ 0.5")
    assert written.getvalue() == b"?C? 0.5\n"
    stream.close()
    say("closed")


def test_upstreams_displays_are_replaced_and_lines_can_be_taken_out(tmp_path, capsys, monkeypatch):
    class NotebookTable(TrainerCallback):
        pass

    monkeypatch.setattr(display, "DEFAULT_PROGRESS_CALLBACK", NotebookTable)
    upstreams = [ProgressCallback(), PrinterCallback(), NotebookTable()]
    trainer, _ = scripted_trainer(tmp_path, callbacks=[*upstreams, ProgressLines()], **SETTINGS)
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert kinds.count(ProgressLines) == 1, "one that was passed is used"
    assert not {ProgressCallback, PrinterCallback, NotebookTable} & set(kinds)
    trainer.remove_callback(ProgressLines)
    capsys.readouterr()
    trainer.train()
    assert capsys.readouterr().out == ""
