"""Curves: what is drawn, by hand; and the command."""

from pathlib import Path

import pytest

from tests.watch.test_runs import write_lines
from trl_stppo.cli import main
from trl_stppo.watch import Run, draw_curves

mpl_figure = pytest.importorskip("matplotlib.figure")


def history(*values, metric="episode/score", start=1):
    return [{metric: value, "step": start + i} for i, value in enumerate(values)]


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
    runs = {"a": Run(Path(), entries), "b_b": Run(Path(), success[:1])}
    lines, labels = drawn(runs, tmp_path / "new" / "x.png", monkeypatch)
    assert list(lines) == ["success", "KL to the sampling policy"]
    evaluated = [[2], [0.8]]
    assert lines["success"] == [[[1, 2, 3], [0.5, 0.9, 0.2]], evaluated, [[1], [0.5]], [[], []]]
    assert labels == ["a", "b_b"]


@pytest.mark.parametrize(
    ("words", "named"),
    [(("nowhere",), "nowhere"), (("empty",), "`runs`"), (("a", "--output", "x.odd"), "odd")],
)
def test_mistakes_exit_with_1_and_name_the_word(words, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_lines(Path("a"), history(1.0))
    write_lines(Path("empty"), [{"other": 1.0, "step": 1}])
    assert main(["plot", *words]) == 1
    shown = capsys.readouterr().err
    assert named in shown
    assert "Traceback" not in shown
