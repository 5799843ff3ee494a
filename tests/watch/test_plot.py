"""Curves: what is drawn, by hand; and the command."""

import argparse
import math
from pathlib import Path

import pytest

from tests.watch.test_runs import write_lines
from trl_stppo.watch import Run, draw_curves
from trl_stppo.watch.plot import add_arguments, run

mpl_figure = pytest.importorskip("matplotlib.figure")


def history(*values, metric="episode/score", start=1):
    return [{metric: value, "step": start + i} for i, value in enumerate(values)]


def logged(entries, steps=None) -> Run:
    return Run(Path(), entries, steps_per_rollout=steps)


def test_points_leave_out_what_is_no_number_and_take_the_later_of_two():
    entries = [*history(1.0, None, math.nan, 4.0), {"episode/score": 5.0, "step": 4}, {"step": 9}]
    assert logged(entries).points("episode/score") == ([1.0, 4.0], [1.0, 5.0])


def test_an_update_is_drawn_by_the_mean_of_its_steps():
    run = logged(history(1.0, 2.0, 6.0, 5.0, 9.0), 4)
    assert run.points("episode/score") == ([1, 2], [3.5, 9.0])
    assert run.points("episode/score", 1) == ([1, 2, 3, 4, 5], [1.0, 2.0, 6.0, 5.0, 9.0])
    assert logged(history(1.0, start=0), 4).points("episode/score") == ([0], [1.0])


def test_a_fall_is_where_their_number_grows():
    entries = history(0, 0, 1, 1, 3, metric="guard/falls")
    assert logged(entries).falls() == {3, 5}
    assert logged(entries, 4).falls() == {1, 2}
    assert logged(history(1, metric="guard/falls")).falls() == {1}


def drawn(runs, path, monkeypatch):
    """The figure that is saved: titles, lines and legend."""
    seen = []
    original = mpl_figure.Figure.savefig
    monkeypatch.setattr(
        mpl_figure.Figure, "savefig", lambda f, *a, **k: (seen.append(f), original(f, *a, **k))[1]
    )
    assert draw_curves(runs, path).read_bytes().startswith(b"\x89PNG")
    (figure,) = seen
    axes = [axis for axis in figure.axes if axis.axison]
    lines = {a.get_title(): [[*map(list, x.get_data())] for x in a.get_lines()] for a in axes}
    return lines, [text.get_text() for text in figure.legends[0].get_texts()]


def test_one_picture_has_all_runs(tmp_path, monkeypatch):
    success = history(0.5, 0.9, 0.2, metric="episode/success_rate")
    entries = [*success, *history(1.0), *history(0.1, 0.2, metric="policy/approx_kl")]
    entries += [{"eval_episode/success_rate": 0.8, "step": 2}, {"guard/falls": 0, "step": 2}]
    runs = {"a": logged(entries), "b_b": logged(success[:1])}
    lines, labels = drawn(runs, tmp_path / "new" / "x.png", monkeypatch)
    assert list(lines) == ["success", "KL to the sampling policy"]
    evaluated = [[2], [0.8]]
    assert lines["success"] == [[[1, 2, 3], [0.5, 0.9, 0.2]], evaluated, [[1], [0.5]], [[], []]]
    assert labels == ["a", "b_b"]


def test_a_score_stands_in_for_success_and_the_axis_has_one_unit(tmp_path, monkeypatch):
    runs = {"a": logged(history(1.0, -2.0), 2), "b": logged(history(3.0))}
    lines, _ = drawn(runs, tmp_path / "x.png", monkeypatch)
    assert lines == {"score": [[[1, 2], [1.0, -2.0]], [[], []], [[1], [3.0]], [[], []]]}


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
    [(("nowhere",), "nowhere"), (("empty",), "`runs`"), (("a", "--output", "x.odd"), "odd")],
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
