"""The list of mutants still fits the sources, and its runner says what it finds."""

import json
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


def test_the_runner_tells_killed_survived_and_outdated_apart(tmp_path, monkeypatch, capsys):
    package, test = tmp_path / "trl_stppo", "tests/test_small.py"
    package.mkdir()
    (tmp_path / "tests").mkdir()
    (package / "__init__.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / test).write_text(
        "import trl_stppo\n\n\ndef test():\n    assert trl_stppo.add(2, 2) == 4\n"
    )
    entries = [
        {"name": name, "file": "trl_stppo/__init__.py", "breaks": "x.", "tests": [test], **text}
        for name, text in {
            "minus": {"old": "a + b", "new": "a - b"},
            "times": {"old": "a + b", "new": "a * b"},
            "gone": {"old": "a / b", "new": "a"},
        }.items()
    ]
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "COPIED", ("trl_stppo", "tests"))
    monkeypatch.setattr(run, "mutants", lambda: entries)
    monkeypatch.setattr("sys.argv", ["run.py"])
    assert run.main() == 1
    *lines, last = capsys.readouterr().out.splitlines()
    verdicts = [line.rpartition(" ")[0] for line in lines if line.endswith(": x.")]
    assert verdicts == ["killed         minus:", "SURVIVED       times:", "text not found gone:"]
    found = json.loads(last)
    assert (found["mutants"], found["killed"], found["SURVIVED"], found["text not found"]) == (
        3, 1, 1, 1,
    )  # fmt: skip
    monkeypatch.setattr("sys.argv", ["run.py", "--only", "min"])
    assert run.main() == 0
    assert "a + b" in (package / "__init__.py").read_text(), "the checkout is not touched"
