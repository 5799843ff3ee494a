"""Reading runs from their folders."""

import json

import pytest

from trl_stppo.watch.runs import number, read_run

ENTRIES = [{"a": 1.0, "step": 1}, {"a": 2.0, "step": 2}]


def write_lines(folder, entries=ENTRIES, end="\n", **settings):
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"format": 1, "settings": settings, "steps_per_rollout": 1}, *entries]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + end)
    return folder


def test_a_line_that_is_being_written_does_not_count_yet(tmp_path):
    folder = write_lines(tmp_path, end='\n{"a": 3.0, "st')
    assert read_run(folder).history == ENTRIES


@pytest.mark.parametrize(
    "value", [pytest.param(10**400, id="long"), float("inf"), float("nan"), True, "1", None]
)
def test_what_is_no_finite_number_is_left_out(value):
    assert number(value) is None


@pytest.mark.parametrize(("text", "message"), [
    ('{"format": 2}\n', "format 2; this version reads 1"),
    ("nonsense\n", "JSONDecodeError"),
    ("[" * 100_000 + "\n", "RecursionError"),
])  # fmt: skip
def test_a_damaged_file_is_named(text, message, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_run(tmp_path)
    assert "metrics.jsonl" in str(caught.value)
