"""The list of mutants still fits the sources, and its runner says what it finds."""

from collections import Counter

import pytest

from tests.mutants import run

MUTANTS = run.mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["name"])
def test_a_mutant_changes_one_place_and_names_its_tests(mutant):
    text = (run.ROOT / mutant["file"]).read_text(encoding="utf-8")
    assert text.count(mutant["old"]) == 1, "`old` must occur once; adapt tests/mutants/mutants.toml"
    compile(text.replace(mutant["old"], mutant["new"]), mutant["file"], "exec")
    assert mutant["new"] != mutant["old"]
    assert mutant["breaks"].endswith(".")
    assert mutant["tests"]
    for file in mutant["tests"]:
        assert (run.ROOT / file).is_file(), file


def test_there_are_enough_and_no_name_twice():
    assert len(MUTANTS) >= 60
    assert max(Counter(mutant["name"] for mutant in MUTANTS).values()) == 1
