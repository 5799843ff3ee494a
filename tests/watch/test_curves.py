"""Curves: what is drawn, by hand; that files are pictures of it; and the command."""

import argparse
import math
from pathlib import Path

import pytest

from tests.watch.test_runs import write_lines
from trl_stppo.watch import draw_curves
from trl_stppo.watch.curves import falls, points
from trl_stppo.watch.plot_command import add_arguments, run

mpl_figure = pytest.importorskip("matplotlib.figure")


def history(*values, metric="episode/score", start=1):
    return [{metric: value, "step": start + i} for i, value in enumerate(values)]


def test_points_leave_out_what_is_no_number_and_take_the_later_of_two():
    entries = [*history(1.0, None, math.nan, 4.0), {"episode/score": 5.0, "step": 4}, {"step": 9}]
    assert points(entries, "episode/score") == ([1.0, 4.0], [1.0, 5.0])


def test_an_update_is_drawn_by_the_mean_of_its_steps():
    entries = history(1.0, 2.0, 6.0, 5.0, 9.0)
    assert points(entries, "episode/score", 4) == ([1, 2], [3.5, 9.0])
    assert points(history(1.0, start=0), "episode/score", 4) == ([0], [1.0])
    assert falls(history(0, 0, 1, 1, 3, metric="guard/falls"), 4) == {1, 2}


def test_a_fall_is_where_their_number_grows():
    assert falls(history(0, 0, 1, 1, 3, metric="guard/falls")) == {3.0, 5.0}
    assert falls(history(1, metric="guard/falls")) == {1.0}


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    seen = []
    original = mpl_figure.Figure.savefig
    monkeypatch.setattr(
        mpl_figure.Figure, "savefig", lambda f, *a, **k: (seen.append(f), original(f, *a, **k))[1]
    )
    return seen


def lines_of(axis) -> list[tuple[list[float], list[float]]]:
    return [tuple(map(list, line.get_data())) for line in axis.get_lines()]


def test_what_is_on_the_picture(drawn, tmp_path):
    success = history(0.5, 0.9, 0.2, metric="episode/success_rate")
    entries = [*success, *history(1.0), *history(0.1, 0.2, metric="policy/approx_kl")]
    entries += [{"eval_episode/success_rate": 0.8, "step": 2}, {"guard/falls": 0, "step": 2}]
    entries += [{"guard/falls": 1, "step": 3}]
    draw_curves({"run": entries}, tmp_path / "new" / "x.png", "a_title")
    (figure,) = drawn
    shown = [axis for axis in figure.axes if axis.axison]
    assert [axis.get_title() for axis in shown] == ["success", "KL to the sampling policy"]
    assert lines_of(shown[0]) == [([1, 2, 3], [0.5, 0.9, 0.2]), ([2], [0.8]), ([3], [0.2])]
    assert figure.get_suptitle() == "a_title"
    assert not figure.legends


def test_a_score_stands_in_for_success_and_two_runs_have_a_legend(drawn, tmp_path):
    draw_curves({"a": history(1.0, -2.0), "b_b": history(3.0)}, tmp_path / "x.png")
    (figure,) = drawn
    assert figure.axes[0].get_title() == "score"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b_b"]


def test_there_are_six_panels_at_most(drawn, tmp_path):
    names = ("episode/success_rate", "episode/score", "policy/approx_kl", "policy/clip_fraction")
    names += ("policy/entropy", "clip_bias/scale", "value/explained_variance", "clip_bias/norm")
    draw_curves({"run": [{name: 0.5 for name in names} | {"step": 1}]}, tmp_path / "x.png")
    assert len([axis for axis in drawn[0].axes if axis.axison]) == 6


@pytest.mark.parametrize(
    ("ending", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_the_same_picture_gives_the_same_file(ending, start, tmp_path):
    files = [draw_curves({"run": history(1.0, 2.0)}, tmp_path / f"{i}.{ending}") for i in range(2)]
    first, second = (file.read_bytes() for file in files)
    assert first == second
    assert first.startswith(start)


def plot(*words) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(word) for word in words]))


def test_pictures_lie_beside_one_run_or_where_they_are_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_lines(Path(name), history(1.0, 2.0))
    assert plot("a") == plot("a", "b") == plot("a", "--output", "deep/x.pdf") == 0
    assert capsys.readouterr().out.split() == [
        *("picture:", "a/curves.png", "picture:", "curves.png", "picture:", "deep/x.pdf")
    ]


@pytest.mark.parametrize(
    ("words", "named"),
    [(("nowhere",), "nowhere"), (("empty",), "`runs`"), (("a", "--output", "x.gif"), "output")],
)
def test_mistakes_exit_with_1_and_name_the_word(words, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_lines(Path("a"), history(1.0))
    write_lines(Path("empty"), [{"other": 1.0, "step": 1}])
    assert plot(*words) == 1
    assert named in capsys.readouterr().err


def test_damaged_entries_are_left_out_and_counted(tmp_path, caplog):
    write_lines(tmp_path, [{"a": 1.0, "step": 1}, "odd", {"a": 1.0, "step": "x"}, *history(2.0)])
    assert plot(tmp_path) == 0
    assert "2 damaged entries" in caplog.text
