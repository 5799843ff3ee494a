"""The live view around real trainings: on a terminal, in a file, with errors, resumed, evaluated."""

from __future__ import annotations

import io
import logging
import re
import sys
from types import SimpleNamespace

import pytest
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from tests.scripted import numbered_rows, scripted_trainer
from tests.watch.screen_kit import Screen, terminal
from trl_stppo import LiveView
from trl_stppo.watch import ProgressLines
from trl_stppo.watch.figures import NOTHING
from trl_stppo.watch.live import HEADING

# Two optimizer steps a round, three rounds.
SETTINGS = {"max_steps": 6, "num_ppo_epochs": 2, "rows": 32, "live_view": True}


class AtStep(TrainerCallback):
    """Does something in the middle of a training."""

    def __init__(self, step: int, act) -> None:
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self.step:
            self.act()


def speak() -> None:
    print("printed in the middle")
    logging.getLogger("trl_stppo.tests").warning("a warning of [ours]")


def fail() -> None:
    raise RuntimeError("broken on purpose")


def stop() -> None:
    raise KeyboardInterrupt


def test_a_training_in_a_terminal(tmp_path, monkeypatch):
    with terminal(monkeypatch, columns=100) as seen:
        streams = sys.stdout, sys.stderr
        trainer, _ = scripted_trainer(
            tmp_path,
            callbacks=[AtStep(3, speak)],
            log_completions=True,
            eval_dataset=numbered_rows(4),
            eval_strategy="steps",
            eval_steps=4,
            **SETTINGS,
        )
        kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
        trainer.train()
        assert (sys.stdout, sys.stderr) == streams
    assert ProgressCallback not in kinds
    assert PrinterCallback not in kinds
    screen = Screen(100).feed(seen[0])
    text = screen.text
    assert screen.cursor_shown
    assert text.count("newest episode") == 1, "one panel, and nothing left of the earlier ones"
    assert text.count("printed in the middle") == 1
    panel = text[text.index("╭─ s-ppo") :]
    for words in ("step 6/6, 100 %", "held-out", "(step 6)", "! a warning of [ours]", "0 s left"):
        assert words in panel, words
    entry = [e for e in trainer.state.log_history if "policy/clip_fraction" in e][-1]
    assert f"{entry['policy/clip_fraction']:.3f}" in panel
    # TRL's tables of completions, whole: of six steps, two evaluations, and the last log.
    assert text.count("Completion") == text.count("╰─") - 1 == 9
    assert text.index("printed in the middle") < text.index("╭─ s-ppo")


@pytest.mark.parametrize(("act", "error"), [(fail, RuntimeError), (stop, KeyboardInterrupt)])
def test_the_terminal_is_given_back_however_a_training_ends(act, error, tmp_path, monkeypatch):
    with terminal(monkeypatch, NO_COLOR="1") as seen:
        streams = sys.stdout, sys.stderr
        trainer, _ = scripted_trainer(tmp_path, callbacks=[AtStep(2, act)], **SETTINGS)
        with pytest.raises(error):
            trainer.train()
        assert (sys.stdout, sys.stderr) == streams
        print("afterwards")
        handlers = logging.getLogger("trl_stppo").handlers
    screen = Screen().feed(seen[0])
    assert screen.lines[-2] == "afterwards"
    assert screen.cursor_shown
    assert not screen.colours
    assert [type(handler).__name__ for handler in handlers] == []


def lines_of(captured: str) -> list[str]:
    return [line for line in captured.split("\n") if re.match(r" +\d+/\d", line) or line == HEADING]


def test_elsewhere_there_is_one_line_per_rollout_batch(tmp_path, capsys):
    trainer, _ = scripted_trainer(tmp_path, **SETTINGS)
    trainer.train()
    printed = capsys.readouterr().out
    heading, *lines = lines_of(printed)
    assert heading == HEADING
    assert [line.split()[0] for line in lines] == ["2/6", "4/6", "6/6"]
    assert "{" not in printed, "in place of TRL's dictionaries"
    logged = [e["policy/clip_fraction"] for e in trainer.state.log_history if "loss" in e]
    success, valid, clip = lines[1].split()[1:4]
    assert (success, valid, clip) == (NOTHING, NOTHING, f"{sum(logged[2:4]) / 2:.3f}")
    assert "nan" not in printed


def test_a_resumed_run_goes_on_with_its_next_line_and_its_own_time(tmp_path, capsys):
    settings = {**SETTINGS, "save_strategy": "steps", "save_steps": 2}
    trainer, _ = scripted_trainer(tmp_path, callbacks=[AtStep(3, fail)], **settings)
    with pytest.raises(RuntimeError):
        trainer.train()
    capsys.readouterr()
    trainer, _ = scripted_trainer(tmp_path, **settings)
    trainer.train(resume_from_checkpoint=True)
    _, *lines = lines_of(capsys.readouterr().out)
    assert [line.split()[0] for line in lines] == ["4/6", "6/6"]
    view = next(c for c in trainer.callback_handler.callbacks if isinstance(c, LiveView))
    assert len(view.figures.course) == 3, "the course is that of the whole run"


def test_progress_lines_print_and_the_live_view_prints_in_their_place(tmp_path, capsys):
    before = {"eval_episode/success_rate": 0.25}
    for live in (False, True):
        trainer, _ = scripted_trainer(tmp_path, **{**SETTINGS, "max_steps": 2, "live_view": live})
        lines = ProgressLines(trainer)
        lines.start(before)
        trainer.train()
        printed = capsys.readouterr().out
        assert printed.startswith("held-out success before training: 0.250\n")
        assert [line.split()[0] for line in lines_of(printed)] == ["step", "2/2"], live


def test_several_processes_share_a_terminal_as_lines(tmp_path, monkeypatch):
    state = SimpleNamespace(log_history=[], global_step=0, max_steps=4, is_world_process_zero=True)
    for rank in (0, 1):
        state.is_world_process_zero = rank == 0
        with terminal(monkeypatch) as seen:
            view = LiveView()
            view._lines.file = sys.stdout
            args = SimpleNamespace(world_size=2, output_dir=str(tmp_path))
            view.on_train_begin(args, state, None)
            assert not view.live
            state.log_history.append({"policy/clip_fraction": 0.5, "step": 1})
            state.global_step = 1
            view.on_step_end(args, state, None)
            view.on_log(args, state, None)
            state.global_step = 0
        assert len(lines_of(Screen().feed(seen[0]).text)) == (2 if rank == 0 else 0)


def test_a_view_among_the_callbacks_knows_the_newest_episode(tmp_path):
    trainer, _ = scripted_trainer(
        tmp_path, callbacks=[LiveView()], **{**SETTINGS, "live_view": False}
    )
    (view,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, LiveView))
    assert view.newest_episode() is None
    trainer._logs["completion"].append([{"role": "assistant", "content": "[a]"}])
    trainer._logs["extra"]["stop_reason"].append("terminated")
    trainer.last_scores = [0.5]
    assert view.newest_episode() == "(score 0.5, terminated) assistant: [a]"
    assert not view.stop_requested()


def test_warnings_are_printed_as_they_would_be_without(monkeypatch, tmp_path):
    printed = io.StringIO()
    handler = logging.StreamHandler(printed)
    logging.getLogger("trl_stppo").addHandler(handler)
    try:
        with terminal(monkeypatch) as seen:
            trainer, _ = scripted_trainer(
                tmp_path, callbacks=[AtStep(1, speak)], **{**SETTINGS, "max_steps": 2}
            )
            trainer.train()
    finally:
        logging.getLogger("trl_stppo").removeHandler(handler)
    assert printed.getvalue() == "a warning of [ours]\n"
    assert Screen().feed(seen[0]).text.count("a warning of [ours]") == 1, "in the panel"
