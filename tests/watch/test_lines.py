"""The lines of a training: what it is, one per rollout batch, one per evaluation, and no others."""

import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from tests.kit import builders
from tests.kit.scripted import numbered_rows, scripted_trainer
from trl_stppo.trainer import display
from trl_stppo.watch.lines import ProgressLines
from trl_stppo.watch.runs import SCORE, SUCCESS

CONSOLE = Path(__file__).parents[1] / "fixtures" / "console.txt"
# Two optimizer steps a round, three rounds of eight episodes.
SETTINGS = {"max_steps": 6, "num_ppo_epochs": 2, "rows": 32}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def first_words(lines: list[str], start: str = "rollout") -> list[str]:
    return [" ".join(line.split()[:2]) for line in lines if line.startswith(start)]


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


@pytest.mark.parametrize(("stabilizers", "most"), [(["share"], ""), (["trust_region"], "up to ")])
def test_the_rate_is_the_largest_one_of_a_trust_region(stabilizers, most, tmp_path, capsys):
    settings = SETTINGS | {"max_steps": 2, "stabilizers": stabilizers}
    trainer, _ = scripted_trainer(tmp_path, **settings)
    trainer.train()
    assert f"\nlearning rates: policy {most}{trainer.args.learning_rate:g}, critic" in capsys.readouterr().out


@pytest.mark.long
def test_a_resumed_run_goes_on_with_its_next_line(tmp_path, capsys):
    settings = {**SETTINGS, "save_strategy": "steps", "save_steps": 2}

    def fail():
        raise RuntimeError("broken on purpose")

    fails = builders.at_step("on_step_end", 3, fail)
    trainer, _ = scripted_trainer(tmp_path, callbacks=[fails], **settings)
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
        global_step=step, max_steps=max_steps, log_history=history, is_world_process_zero=main
    )


def two_rollouts(
    logs: list[dict], main: bool = True, max_steps: int = 4
) -> tuple[ProgressLines, SimpleNamespace, ...]:
    """A training of which these are the log entries."""
    lines = ProgressLines()
    args = SimpleNamespace(
        learning_rate=1e-3, lr_scheduler_type="constant", output_dir="runs/a", eval_strategy="no"
    )
    lines.on_train_begin(args, state_of(0, [], main, max_steps), None)
    for step in range(1, len(logs) + 1):
        state = state_of(step, logs[:step], main, max_steps)
        lines.on_log(args, state, None)
    return lines, args, state


@pytest.mark.parametrize("solved", [0.0, 0.5])
def test_a_score_stands_beside_a_success_of_0_for_the_whole_run(solved, capsys):
    entries = [
        {"policy/clip_fraction": 0.1, "policy/entropy": 1.0, SUCCESS: value, SCORE: 0.25}
        for value in (solved, 0.5)
    ]
    two_rollouts(entries)
    (heading,) = [line for line in capsys.readouterr().out.splitlines() if " success " in line]
    labels = heading.split()
    assert ("score" in labels, "entropy" in labels) == (not solved, bool(solved))


@pytest.mark.parametrize("main", [True, False])
def test_only_the_main_process_prints(main, capsys):
    entry = {"policy/clip_fraction": 0.5, "guard/empty_steps": 2}
    lines, args, state = two_rollouts([entry, entry], main)
    lines.on_evaluate(args, state, None, metrics={"eval_runtime": 1.0})
    lines.on_train_end(args, state, None)
    printed = capsys.readouterr().out
    if not main:
        assert printed == ""
        return
    assert printed.count("! 2 optimizer steps skipped, no episode to learn from\n") == 1, "a running total"
    assert printed.splitlines()[-1].startswith("stopped after rollout 2/4, step 2/4, in ")


@pytest.mark.long
@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(5, "the terminal has gone")])
def test_a_terminal_that_has_gone_does_not_end_a_training(error, tmp_path, monkeypatch):
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    trainer, _ = scripted_trainer(tmp_path, **SETTINGS)
    monkeypatch.setattr(sys, "stdout", Gone())
    trainer.train()
    assert trainer.state.global_step == 6


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


@pytest.mark.parametrize("removed", [False, True])
def test_a_long_rollout_and_update_tell_their_progress_while_there_are_lines(
    removed, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("trl_stppo.rollout.engine.REPORT_SECONDS", 0.0)
    monkeypatch.setattr("trl_stppo.watch.lines.QUIET_SECONDS", -1.0)
    trainer = builders.build(tmp_path, arguments=builders.TEXT, **builders.LIMITS, max_steps=4)
    if removed:
        trainer.remove_callback(ProgressLines)
    trainer.train()
    shown = capsys.readouterr().out
    batch = r"rollout batch: \d+ of \d+ episodes have ended, after \d+ turns"
    assert (re.search(batch, shown) is None) is removed
    # The line of the rollout itself comes with the last step.
    assert shown.count("  update: 1 of 2 optimizer steps\n") == (0 if removed else 2)


def test_a_long_evaluation_counts_the_episodes_of_all_batches(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("trl_stppo.rollout.engine.REPORT_SECONDS", 0.0)
    arguments = {**builders.TEXT, "eval_dataset": builders.prompts()}
    options = {**builders.LIMITS, "per_device_eval_batch_size": 2, "max_turns": 1}
    trainer = builders.build(tmp_path, arguments=arguments, **options)
    trainer.evaluate()
    lines = capsys.readouterr().out
    shown = re.findall(r"evaluation: (\d+) of (\d+) episodes have ended, after (\d+) turns", lines)
    assert {total for _, total, _ in shown} == {str(len(builders.prompts()))}
    assert max(int(ended) for ended, *_ in shown) > 2
    assert all(int(turns) >= int(ended) for ended, _, turns in shown)
