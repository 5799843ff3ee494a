"""Reading runs from their folders."""

import json
import os

import pytest

from trl_stppo.watch.runs import number, read_run

ENTRIES = [{"a": 1.0, "step": 1}, {"a": 2.0, "step": 2}]


def write_lines(folder, entries=ENTRIES, end="\n", **settings):
    folder.mkdir(parents=True, exist_ok=True)
    lines = [{"format": 1, "settings": settings}, *entries]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + end)
    return folder


def write_state(folder, entries=ENTRIES):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": entries}))
    return folder


def test_a_line_that_is_being_written_does_not_count_yet(tmp_path):
    folder = write_lines(tmp_path, end='\n{"a": 3.0, "st')
    assert read_run(folder).history == ENTRIES


@pytest.mark.parametrize(
    "value", [pytest.param(10**400, id="long"), float("inf"), float("nan"), True, "1", None]
)
def test_what_is_no_finite_number_is_left_out(value):
    assert number(value) is None


def test_metrics_of_trl_are_drawn_under_our_names(tmp_path):
    write_state(tmp_path, [{"reward": 0.5, "entropy": 1.0, "step": 1}, {"loss": 1.0, "step": 2}])
    first, second = read_run(tmp_path).history
    assert (first["episode/score"], first["policy/entropy"], first["reward"]) == (0.5, 1.0, 0.5)
    assert second == {"loss": 1.0, "step": 2}


@pytest.mark.parametrize(("played", "every", "pace"), [
    (range(1, 9), 1, 1), ((1, 5, 9), 1, 4), ((1, 5, 9), 1.0, 4),
    ((4, 8), 4, None), ((1,), 1, None), ((), 1, None),
])  # fmt: skip
def test_steps_per_rollout_of_a_trl_run(played, every, pace, tmp_path):
    entries = [
        {"loss": 0.1, "step": step} | ({"num_tokens": 9.0} if step in played else {})
        for step in (type(every)(n) for n in range(int(every), 10, int(every)))
    ]
    write_state(tmp_path, [*entries, {"train_runtime": 1.0, "step": 9}])
    assert read_run(tmp_path).steps_per_rollout == pace


def test_a_run_that_goes_on_is_read_from_its_newest_checkpoint(tmp_path):
    for step, at in ((9, 100), (10, 300), (8, 200)):
        entries = [{"a": float(step), "step": step}]
        file = write_state(tmp_path / f"checkpoint-{step}", entries) / "trainer_state.json"
        os.utime(file, (at, at))
    assert read_run(tmp_path).history == [{"a": 10.0, "step": 10}]
    assert read_run(tmp_path / "checkpoint-8").history == [{"a": 8.0, "step": 8}]


@pytest.mark.parametrize(("name", "text", "message"), [
    ("metrics.jsonl", '{"format": 2}\n', "format 2; this version reads 1"),
    ("metrics.jsonl", "nonsense\n", "JSONDecodeError"),
    ("metrics.jsonl", "[" * 100_000 + "\n", "RecursionError"),
    ("trainer_state.json", '{"log_history": null}', "TypeError"),
])  # fmt: skip
def test_a_damaged_file_is_named(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_run(tmp_path)
    assert name in str(caught.value)
