"""The panel of the live view at several widths and heights, with whatever an episode may contain."""

from __future__ import annotations

import io
import math

import pytest
from rich.cells import cell_len
from rich.console import Console

from trl_stppo.watch.figures import NOTHING, Figures, Progress
from trl_stppo.watch.panel import CELLS, LivePanel, one_line

ENTRY = {
    "episode/success_rate": 0.5,
    "episode/score": 0.625,
    "step": 8,
    **{name: 0.125 for _, name, _ in CELLS},
    "perf/rollout_tokens_per_second": 1234.5,
    "perf/update_tokens_per_second": 4321.0,
    "turns/mean": 3.0,
    "turns/tokens_mean": 5.0,
    "perf/generation_seconds": 1.0,
    "perf/wait_seconds": 0.5,
}


def panel_of(*entries: dict, **limits: float) -> LivePanel:
    figures, progress = Figures(), Progress(1, episodes=823)
    for entry in entries:
        figures.add(entry)
    progress.start(0, 64)
    progress.begin_step()
    progress.end_step(8)
    progress._round = 12.0  # as if the update had taken two of them
    panel = LivePanel(figures, progress, limits)
    panel.title = "st-ppo runs/demo"
    return panel


def render(panel: LivePanel, width: int = 80, height: int = 40, **options) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), **options)
    console.print(panel)
    return console.file.getvalue().rstrip("\n").split("\n")


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120, 200])
def test_every_line_fits(width):
    panel = panel_of(*[{**ENTRY, "episode/success_rate": i / 20} for i in range(20)])
    panel.episode, panel.warning = "said " * 100, "careful " * 50
    lines = render(panel, width, 60)
    assert {cell_len(line) for line in lines} == {width}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_all_figures_are_there(width):
    panel = panel_of(ENTRY, ENTRY, {"eval_episode/success_rate": 0.75, "step": 8})
    panel.episode = "user: Q assistant: A"
    text = "\n".join(render(panel, width))
    for label in (
        *("success 0.500", "mean of 2 0.500", "score 0.625", "held-out 0.750", "step 8/64, 12 %"),
        *("1,234 / 4,321", "user: Q assistant: A", "left", "st-ppo runs/demo"),
        *(label for label, _, _ in CELLS),
    ):
        assert label in text, label


def test_missing_figures_are_dashes_and_fill_no_line_with_nan():
    text = "\n".join(
        render(panel_of({**ENTRY, "policy/approx_kl": math.nan, "clip_bias/scale": None}))
    )
    assert "nan" not in text.lower()
    assert text.count(NOTHING) == 2


def test_before_the_first_log_there_are_dashes_only():
    figures, progress = Figures(), Progress()
    text = "\n".join(render(LivePanel(figures, progress, {})))
    assert f"success {NOTHING}" in text
    assert "newest episode" not in text


def test_the_time_split_adds_up_in_words():
    # 823 * 15 / 1234.5 = 10.0 seconds of rollout: 1 generation, 0.5 waiting, 8.5 scoring; 2 update.
    text = "\n".join(render(panel_of(ENTRY)))
    for words in ("generation 8 %", "environments 4 %", "scoring 71 %", "update 17 %"):
        assert words in text


def test_rollouts_that_nobody_has_timed_are_one_part():
    untold = {**ENTRY, "perf/generation_seconds": 1e-9, "perf/wait_seconds": 1e-9}
    text = "\n".join(render(panel_of(untold)))
    assert "rollout 83 %" in text
    assert "generation" not in text


def test_markup_and_control_characters_of_an_episode_are_text():
    panel = panel_of(ENTRY)
    panel.episode = "[bold red]x[/] [link=file:///]\x1b[2J\x07 a\nb\r\u202eabc [/nothing]"
    text = "\n".join(render(panel, 120))
    assert "[bold red]x[/] [link=file:///] [2J a b abc [/nothing]" in text


def test_a_long_episode_keeps_its_beginning_and_its_end():
    assert one_line("a" * 100 + "z" * 10**7, 30) == "a" * 18 + " … " + "z" * 9
    assert one_line("short \n text", 30) == "short text"
    assert one_line("x" * 31, 30) == "x" * 18 + " … " + "x" * 9
    assert one_line("y" * 16 * 30, 30).count("y") == 27


@pytest.mark.parametrize("height", [8, 12, 16, 24])
def test_a_low_terminal_gets_fewer_rows(height):
    panel = panel_of(ENTRY)
    panel.episode, panel.warning = "said " * 100, "careful"
    lines = render(panel, 80, height)
    assert len(lines) <= height - 1
    assert "success 0.500" in lines[1]


def test_guards_speak_up():
    panel = panel_of(
        {
            **ENTRY,
            "turns/valid_action_rate": 0.125,
            "guard/skipped_steps": 2,
            "guard/empty_steps": 3,
        },
        min_valid_action_rate=0.3,
    )
    panel.warning = "Step 12 is skipped"
    text = "\n".join(render(panel))
    for words in (
        "! 2 optimizer steps skipped as not finite",
        "! 3 optimizer steps skipped, no episode to learn from",
        "! turns/valid_action_rate is below min_valid_action_rate=0.3",
        "! Step 12 is skipped",
    ):
        assert words in text
    assert "!" not in "\n".join(render(panel_of({**ENTRY, "guard/skipped_steps": 0})))


def test_colours_are_left_out_where_they_are_not_wanted():
    panel = panel_of(ENTRY)
    coloured = "\n".join(render(panel, force_terminal=True, color_system="standard"))
    plain = "\n".join(render(panel, force_terminal=True, no_color=True))
    assert "\x1b[36m" in coloured
    assert "36m" not in plain
    assert all(character in plain for character in "█▓▒░"), "parts are told apart without colours"
