"""Curves: what is drawn, by hand; and that files are pictures of it."""

from __future__ import annotations

import itertools
import math

import pytest

from trl_stppo.watch import draw_curves
from trl_stppo.watch.curves import DIAGNOSTICS, band, chosen, draw_groups, measured, points

mpl_figure = pytest.importorskip("matplotlib.figure")
mpl_text = pytest.importorskip("matplotlib.text")


def history(*values, metric="episode/score", start=1):
    return [{metric: value, "step": start + i} for i, value in enumerate(values)]


def test_points_leave_out_what_is_no_number_and_take_the_later_of_two():
    entries = [*history(1.0, None, math.nan, 4.0), {"episode/score": 5.0, "step": 4}, {"step": 9}]
    assert points(entries, "episode/score") == ([1.0, 4.0], [1.0, 5.0])


def test_smoothing_averages_the_last_values_and_looks_at_none_to_come():
    assert points(history(1.0, 3.0, 5.0, 100.0), "episode/score", 3)[1] == [1.0, 2.0, 3.0, 36.0]


def test_a_band_is_the_mean_and_the_extremes_of_those_that_have_come_so_far():
    first = ([1.0, 3.0], [0.0, 4.0])  # 2 between
    second = ([1.0, 2.0, 3.0, 4.0], [1.0, 6.0, 0.0, 7.0])
    steps, mean, low, high = band([first, second, ([], [])])
    assert steps == [1.0, 2.0, 3.0, 4.0]
    assert mean == [0.5, 4.0, 2.0, 7.0]
    assert low == [0.0, 2.0, 0.0, 7.0]
    assert high == [1.0, 6.0, 4.0, 7.0]
    assert band([]) == ([], [], [], [])


def test_panels_are_those_that_were_measured():
    groups = {"a": [history(1.0)], "b": [history(None, metric="policy/approx_kl")]}
    assert measured(groups) == {"episode/score"}
    assert [d.metric for d in chosen(groups, None)] == ["episode/score"]
    with pytest.raises(
        ValueError, match=r"no run has logged policy/approx_kl\. .*that there are: episode"
    ):
        chosen(groups, ["policy/approx_kl"])
    with pytest.raises(ValueError, match="--metrics; there are: other"):
        chosen({"a": [history(1.0, metric="other")]}, None)
    with pytest.raises(ValueError, match="there are: none"):
        chosen({"a": [[]]}, None)


@pytest.fixture
def drawn(monkeypatch):
    """The figure that is saved last."""
    seen = []
    original = mpl_figure.Figure.savefig

    def save(figure, *args, **kwargs):
        seen.append(figure)
        return original(figure, *args, **kwargs)

    monkeypatch.setattr(mpl_figure.Figure, "savefig", save)
    return seen


def test_what_is_on_the_picture(drawn, tmp_path):
    kl = "policy/approx_kl"
    groups = {
        "ppo": [history(0.1, 0.2, metric=kl), history(0.3, 0.4, metric=kl)],
        "st-ppo": [history(0.001, 0.5, metric=kl)],
    }
    path = draw_groups(groups, tmp_path / "new" / "x.png", "a title")
    assert path.read_bytes()[:4] == b"\x89PNG"
    (axis,) = drawn[-1].axes
    assert [list(line.get_ydata()) for line in axis.lines] == [
        [0.2, pytest.approx(0.3)],
        [0.001, 0.5],
    ]
    assert len({line.get_linestyle() for line in axis.lines}) == 2, "told apart without colours"
    assert len(axis.collections) == 1, "one band, for the group of several"
    assert axis.get_yscale() == "log", "500 times as much at the end"
    assert drawn[-1].get_facecolor() == (1.0, 1.0, 1.0, 1.0)
    assert drawn[-1].get_suptitle() == "a title\nmean of the runs, band from lowest to highest"
    assert [text.get_text() for text in axis.texts] == ["ppo\n2 runs", "st-ppo"], "beside the ends"
    ends = [text.xy for text in axis.texts]
    assert ends == [(2.0, pytest.approx(0.3)), (2.0, 0.5)]
    assert drawn[-1].legends == []


def test_ends_are_named_without_overlap_and_long_names_stand_in_a_legend(drawn, tmp_path):
    success = "episode/success_rate"
    runs = {
        name: [history(0.1, 0.99 + i / 1000, metric=success)] for i, name in enumerate("abcdef")
    }
    draw_groups(runs, tmp_path / "x.png")
    drawn[-1].draw_without_rendering()
    (axis,) = drawn[-1].axes
    boxes = [mpl_text.Text.get_window_extent(text) for text in axis.texts]
    assert len(boxes) == 6
    assert all(low.y1 <= high.y0 for low, high in itertools.pairwise(boxes))
    assert drawn[-1].legends == []
    long = "st-ppo learning_rate=0.0005"
    many, lacking = {**runs, "g": runs["a"]}, {"a": runs["a"], "b": [history(1.0)]}
    for groups in (many, {"a": runs["a"], long: runs["b"]}, lacking):
        draw_groups(groups, tmp_path / "x.png", "a title")
        assert not any(axis.texts for axis in drawn[-1].axes)
        (legend,) = drawn[-1].legends
        assert [text.get_text() for text in legend.get_texts()] == list(groups)
        assert legend.get_title().get_text() == "a title"


def test_zeros_have_no_place_on_a_logarithmic_axis(drawn, tmp_path):
    norm = "clip_bias/norm"
    runs = [
        history(0.0, 0.0, 1.0, 0.0, 100.0, metric=norm),
        history(0.0, 2.0, 3.0, 0.0, 100.0, metric=norm),
    ]
    draw_groups({"st-ppo": runs}, tmp_path / "x.png")
    (axis,) = drawn[-1].axes
    assert axis.get_yscale() == "log"
    (line,) = axis.lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([2.0, 3.0, 5.0], [1.0, 2.0, 100.0])
    (filled,) = axis.collections
    corners = filled.get_paths()[0].vertices
    assert sorted(set(corners[:, 1])) == [1.0, 2.0, 3.0, 100.0], (
        "down to the lowest, not to nothing"
    )


def test_held_out_success_is_beside_that_of_rollouts(drawn, tmp_path):
    success = history(0.1, 0.2, metric="episode/success_rate")
    held_out = [{"eval_episode/success_rate": 0.9, "step": 2}]
    draw_curves({"run": [*success, *held_out]}, tmp_path / "x.png")
    (axis,) = drawn[-1].axes
    circles, line = axis.lines
    assert (list(circles.get_xdata()), list(circles.get_ydata())) == ([2.0], [0.9])
    assert list(line.get_ydata()) == [0.1, 0.2]
    assert axis.get_ylim() == (-0.02, 1.02)
    assert drawn[-1].get_suptitle() == "circles: held-out rows"


def test_one_run_with_all_diagnostics(drawn, tmp_path):
    entries = [
        {**{d.metric: 0.1 * step for d in DIAGNOSTICS}, "step": step} for step in range(1, 6)
    ]
    assert draw_curves({"run": entries}, tmp_path / "x.svg", "st-ppo").read_text()[:5] == "<?xml"
    shown = [axis.get_title() for axis in drawn[-1].axes if axis.axison and axis.get_visible()]
    assert shown == [d.title for d in DIAGNOSTICS]
    assert drawn[-1].legends == [], "one line needs none"


def test_the_same_curves_give_the_same_file(tmp_path):
    files = [draw_curves({"run": history(1.0, 2.0)}, tmp_path / f"{i}.svg") for i in range(2)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_users_own_style_stays_as_it_is(tmp_path):
    import matplotlib as mpl

    backend, face = mpl.get_backend(), mpl.rcParams["figure.facecolor"]
    draw_curves({"run": history(1.0, 2.0)}, tmp_path / "x.pdf")
    assert (mpl.get_backend(), mpl.rcParams["figure.facecolor"]) == (backend, face)


def test_other_kinds_of_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"ends in \.png, \.svg, \.pdf"):
        draw_curves({"run": history(1.0)}, tmp_path / "x.gif")
