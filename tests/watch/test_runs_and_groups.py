"""Reading runs from their folders, and telling which of them repeat each other."""

from __future__ import annotations

import json
import os

import pytest

from trl_stppo.watch.runs import Run, grouped, read_run

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


def test_a_run_by_its_folder_or_by_its_file(tmp_path):
    folder = write_lines(tmp_path / "run", variant="ppo")
    for path in (folder, folder / "metrics.jsonl", str(folder)):
        run = read_run(path)
        assert (run.history, run.settings, run.name) == (ENTRIES, {"variant": "ppo"}, "run")


def test_a_line_that_is_being_written_does_not_count_yet(tmp_path):
    folder = write_lines(tmp_path, end='\n{"a": 3.0, "st')
    assert read_run(folder).history == ENTRIES


def test_a_run_without_the_file_is_read_from_its_state(tmp_path):
    write_state(tmp_path)
    assert read_run(tmp_path).history == ENTRIES


def test_a_run_that_goes_on_is_read_from_its_newest_checkpoint(tmp_path):
    for step, at in ((9, 100), (10, 300), (8, 200)):  # 9 was left behind by going back to 7
        entries = [{"a": float(step), "step": step}]
        file = write_state(tmp_path / f"checkpoint-{step}", entries) / "trainer_state.json"
        os.utime(file, (at, at))
    identity = {"variant": "s-ppo", "seed": 5, "critic": "shared"}
    manifest = {"identity": identity, "settings": {"gamma": 0.9}}
    (tmp_path / "checkpoint-10" / "stppo_checkpoint.json").write_text(json.dumps(manifest))
    run = read_run(tmp_path)
    assert run.history == [{"a": 10.0, "step": 10}]
    assert run.settings == {"gamma": 0.9, "variant": "s-ppo", "seed": 5}
    assert read_run(tmp_path / "checkpoint-8").history == [{"a": 8.0, "step": 8}]


def test_a_file_without_an_entry_is_passed_over(tmp_path):
    write_lines(tmp_path, entries=[])
    with pytest.raises(FileNotFoundError, match=r"holds no log.*logging_steps"):
        read_run(tmp_path)
    write_state(tmp_path / "checkpoint-2")
    assert read_run(tmp_path).history == ENTRIES


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.jsonl", "{}\n", "format None; this version reads 1"),
        ("metrics.jsonl", '{"format": 2}\n', "format 2; this version reads 1"),
        ("metrics.jsonl", "nonsense\n", "JSONDecodeError"),
        ("metrics.jsonl", '{"format": 1, "settings": []}\n', r"`settings` is \[\]; it must be an"),
        ("metrics.jsonl", "[]\n", "AttributeError"),
        ("metrics.jsonl", "[" * 100_000 + "\n", "RecursionError"),
        ("trainer_state.json", '{"log_history": null}', "TypeError"),
        ("trainer_state.json", "{}", "KeyError"),
        ("trainer_state.json", "[]", "TypeError"),
    ],
)
def test_a_damaged_file_is_named(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_run(tmp_path)
    assert name in str(caught.value)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere` does not exist\. Name the output_dir"):
        read_run(tmp_path / "nowhere")


def run_of(folder: str, **settings) -> Run:
    from pathlib import Path

    return Run(Path(folder), list(ENTRIES), settings)


def names(groups):
    return {label: [run.name for run in runs] for label, runs in groups.items()}


def test_seeds_and_places_do_not_tell_runs_apart():
    runs = [
        run_of("a/1", variant="ppo", seed=0, output_dir="a/1"),
        run_of("b/1", variant="st-ppo", seed=0, output_dir="b/1"),
        run_of("a/2", variant="ppo", seed=1, output_dir="a/2", run_name="x"),
    ]
    assert names(grouped(runs)) == {"ppo": ["1", "2"], "st-ppo": ["1"]}


def test_settings_in_which_groups_differ_are_in_their_label():
    runs = [
        run_of("a", variant="ppo", learning_rate=0.1, gamma=0.9),
        run_of("b", variant="ppo", gamma=0.9),
        run_of("c", variant="st-ppo", learning_rate=0.1),
    ]
    assert names(grouped(runs)) == {
        "ppo gamma=0.9 learning_rate=0.1": ["a"],
        "ppo gamma=0.9 learning_rate=default": ["b"],
        "st-ppo gamma=default learning_rate=0.1": ["c"],
    }


def test_what_a_variant_sets_is_no_difference_but_between_its_own_runs():
    own = {"importance_sampling_level": "turn", "stabilizers": ["share"]}
    runs = [
        run_of("a", variant="ppo", learning_rate=0.003),
        run_of("b", variant="st-ppo", learning_rate=0.0005, **own),
    ]
    assert list(grouped(runs)) == ["ppo learning_rate=0.003", "st-ppo learning_rate=0.0005"]
    runs = [run_of(str(power), variant="st-ppo", clip_bias_power=power) for power in (2, 4)]
    assert list(grouped(runs)) == ["st-ppo clip_bias_power=2", "st-ppo clip_bias_power=4"]


def test_runs_of_different_tasks_are_no_repetitions():
    task = {"model": "small", "environment": "GuessEnv", "dataset": "448 rows"}
    runs = [
        run_of("a", variant="ppo", seed=0, **task),
        run_of("b", variant="ppo", seed=1, **task),
        run_of("c", variant="ppo", seed=0, **{**task, "environment": "GuessEnv(largest=15)"}),
        run_of("d", variant="st-ppo", seed=0, **task),
    ]
    assert names(grouped(runs)) == {
        "ppo GuessEnv": ["a", "b"],
        "ppo GuessEnv(largest=15)": ["c"],
        "st-ppo GuessEnv": ["d"],
    }
    assert names(grouped([*runs, run_of("old", variant="st-ppo", seed=1)])) == {
        "ppo small GuessEnv 448 rows": ["a", "b"],
        "ppo small GuessEnv(largest=15) 448 rows": ["c"],
        "st-ppo small GuessEnv 448 rows": ["d"],
        "st-ppo model=unknown environment=unknown dataset=unknown": ["old"],
    }
    assert list(grouped(runs, ["environment"])) == [
        "GuessEnv",
        "GuessEnv(largest=15)",
    ]


def test_groups_by_some_settings_or_none():
    runs = [run_of("a", variant="ppo", gamma=1), run_of("b", variant="ppo", gamma=2)]
    assert names(grouped(runs, ["variant"])) == {"ppo": ["a", "b"]}
    assert names(grouped(runs, ["variant", "gamma"])) == {
        "ppo gamma=1": ["a"],
        "ppo gamma=2": ["b"],
    }
    assert names(grouped(runs, [])) == {"a": ["a"], "b": ["b"]}


def test_runs_that_say_nothing_of_themselves_stay_apart():
    assert names(grouped([run_of("x/a"), run_of("y/a"), run_of("z")])) == {
        "x/a": ["a"],
        "y/a": ["a"],
        "z": ["z"],
    }
