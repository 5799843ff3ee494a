"""`trl-stppo plot`: pictures, tables and CSV of runs, and what it says where it cannot."""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

import pytest

from tests.watch.test_runs_and_groups import write_lines
from trl_stppo.watch.plot_command import add_arguments, run


def plot(*words) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([str(word) for word in words]))


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two seeds of one variant, whose last values are 1 and 3, and one of another."""
    monkeypatch.chdir(tmp_path)
    for name, variant, seed, last in (
        ("a0", "ppo", 0, 1),
        ("a1", "ppo", 1, 3),
        ("b0", "x|y", 0, 8),
    ):
        entries = [{"episode/score": 0.5, "step": 1}, {"episode/score": float(last), "step": 2}]
        write_lines(tmp_path / name, entries, variant=variant, seed=seed)
    return [Path("a0"), Path("a1"), Path("b0")]


def test_the_picture_of_one_run_lies_in_its_folder(runs, capsys):
    assert plot(runs[0]) == 0
    assert capsys.readouterr().out == "picture: a0/curves.png\n"
    assert Path("a0/curves.png").stat().st_size > 1000


def test_the_picture_of_several_lies_where_one_is(runs, capsys):
    assert plot(*runs, "--smooth", 2, "--title", "all") == 0
    assert capsys.readouterr().out == "picture: curves.png\n"
    assert plot(*runs, "--output", "deep/x.pdf", "--metrics", "episode/score") == 0
    assert Path("deep/x.pdf").read_bytes()[:4] == b"%PDF"


def test_the_table_averages_the_last_values_and_the_runs(runs, capsys):
    assert plot(*runs, "--table", "markdown", "--last", 1) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| mean of the last 1 values | ppo | x\\|y |",
        "| --- | ---: | ---: |",
        "| runs | 2 | 1 |",
        "| steps | 2 | 2 |",
        "| score | 2 (1 to 3) | 8 |",
    ]
    assert not Path("curves.png").exists()
    assert plot(*runs, "--table") == 0  # of the last ten: 0.75 and 1.75, 4.25
    printed = capsys.readouterr().out
    assert "1.25 (0.75 to 1.75), of 2" in printed, "there are but two"
    assert "4.25, of 2" in printed


def test_of_evaluations_the_last_one_counts(runs, capsys):
    entries = [{"episode/score": 1.0, "step": 1}]
    entries += [{"eval_episode/score": value, "step": 1} for value in (2.0, 4.0)]
    entries += [{"eval_episode/score": 6.0, "step": 2}]
    write_lines(Path("a0"), entries, variant="ppo")
    assert plot("a0", "--table", "markdown") == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "| score | 1, of 1 |",
        "| held-out score | 6 |",
    ]


def test_csv_holds_all_values(runs, capsys):
    assert plot(*runs, "--csv", "new/x.csv") == 0
    rows = list(csv.DictReader(Path("new/x.csv").read_text().splitlines()))
    assert len(rows) == 6
    assert rows[3] == {
        **{"group": "ppo", "run": "a1", "seed": "1", "step": "2"},
        **{"metric": "episode/score", "value": "3.0"},
    }


def test_groups_on_request(runs, capsys):
    assert plot(*runs, "--table", "markdown", "--group", "none") == 0
    assert "| a0 | a1 | b0 |" in capsys.readouterr().out
    assert plot(*runs, "--table", "markdown", "--group", "seed") == 0
    assert "| seed=0 | seed=1 |" in capsys.readouterr().out
    for words in (("variant,seed",), ("variant", "seed")):
        assert plot(*runs, "--table", "markdown", "--group", *words) == 0
        assert "| ppo seed=0 | ppo seed=1 |" in capsys.readouterr().out


def test_a_group_that_is_not_known_names_what_tells_these_runs_apart(runs, capsys):
    entries = [{"episode/score": 1.0, "step": 1}]
    for name, gamma in (("a0", 1), ("a1", 2)):
        write_lines(Path(name), entries, variant="ppo", gamma=gamma, same="x", also="y")
    assert plot("a0", "a1", "--group", "gama") == 1
    assert capsys.readouterr().err.endswith("These runs differ in: variant, gamma.\n")


@pytest.mark.parametrize("word", ["$", "$x^", "$\\frac$", "a_$b$"])
def test_no_word_is_mathematics(word, runs, capsys):
    entries = [{"episode/score": 1.0, f"own {word}": 2.0, "step": step} for step in (1, 2)]
    for name, gamma in (("a0", word), ("a1", 2)):
        write_lines(Path(name), entries, variant="ppo", gamma=gamma)
    assert plot("a0", "a1", "--title", word) == 0
    assert (
        plot("a0", "a1", "--metrics", f"own {word}", "--group", "gamma", "--output", "x.svg") == 0
    )


@pytest.mark.parametrize(
    "odd",
    [
        *([], None, 7, "text", {"episode/score": 9.0, "step": None}),
        *({"episode/score": 9.0, "step": 10**400}, {"episode/score": 9.0, "step": "3"}),
    ],
)
@pytest.mark.parametrize("words", [(), ("--table", "markdown"), ("--csv", "x.csv")])
def test_damaged_entries_are_left_out_and_counted(words, odd, runs, caplog):
    entries = [{"episode/score": 1.0, "step": 1}, odd, {"episode/score": 10**400, "step": 2}]
    write_lines(Path("a0"), entries, end="\nnonsense\n", variant="ppo")
    assert plot("a0", *words) == 0
    assert "a0/metrics.jsonl: 2 damaged entries are left out." in caplog.text


def test_a_figure_near_the_largest_number_is_drawn(runs):
    write_lines(Path("a0"), [{"episode/score": 1.75e308, "step": step} for step in (1, 2)])
    assert plot("a0") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "`runs=nowhere` does not exist"),
        (
            ["a0", "--group", "colour"],
            "`group=colour`: no run has written down colour. Name settings",
        ),
        (["a0", "--metrics", "colour"], "`metrics=colour`: no run has logged colour. Name some"),
        (["a0", "--output", "x.gif"], "`output=x.gif`: a picture's name ends in .png, .svg, .pdf"),
        (["a0", "--output", "a0/metrics.jsonl/x.png"], "metrics.jsonl"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(words, message, runs, capsys):
    assert plot(*words) == 1
    said = capsys.readouterr()
    assert said.err.startswith("trl-stppo plot: ")
    assert message in said.err
    assert said.out == ""


def test_without_matplotlib_tables_still_work(runs, capsys, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert plot(runs[0]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
    assert plot(runs[0], "--table") == 0


@pytest.mark.parametrize("words", [[], ["a0", "--smooth", "0"], ["a0", "--last", "x"]])
def test_words_that_make_no_sense(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        plot(*words)
