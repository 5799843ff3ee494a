"""What 0.1.0 recorded of a run is read as 0.1.0 read it, by its functions and by its commands.

The run went to step 18, then back to its checkpoint of step 6, and from there to step 12: what was recorded
on the first way after step 6 does not count, though a file of it is still there.
"""

from __future__ import annotations

import json

import pytest

from tests.fixtures.v0_1_0 import recipe
from trl_stppo.cli import main
from trl_stppo.trace import read_trace


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return recipe.unpacked("run", tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def expected(run_folder):
    return json.loads((run_folder / "expected.json").read_text())


def test_the_trace_holds_the_same_episodes_in_the_same_order(run_folder, expected):
    assert (run_folder / "run" / "trace" / "train-0000003-rank0.jsonl.gz").is_file()
    episodes = {episode.key: recipe.traced(episode) for episode in read_trace(run_folder / "run")}
    assert list(episodes) == list(expected["episodes"])
    assert episodes == expected["episodes"]


def test_the_page_shows_them(run_folder, expected, tmp_path, capsys):
    assert main(["trace", str(run_folder / "run"), "--output", str(tmp_path / "page.html")]) == 0
    assert f": {len(expected['episodes'])} episodes" in capsys.readouterr().out


def test_the_table_and_the_values_are_the_same(run_folder, expected, tmp_path, capsys):
    """The figures; what a table calls them may change."""
    values_file = tmp_path / "values.csv"
    assert main(recipe.plot_words(run_folder / "run", values_file)) == 0
    table, values = recipe.plotted(capsys.readouterr().out, values_file)
    assert [row[1:] for row in table] == [row[1:] for row in expected["table"]]
    assert values == expected["values"]
