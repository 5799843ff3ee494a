"""Trace files: what is written is read, whatever was killed, damaged or done again meanwhile."""

import gzip
import math
from dataclasses import replace

import pytest

from tests.kit.trace_kit import HOSTILE, add_hostile, episode, made_up_run
from trl_stppo.cli import main
from trl_stppo.trace import TracedUpdate, files, read_trace


def update(number: int, *, start: int = 1, first_step: int = 0, **options) -> TracedUpdate:
    return TracedUpdate(
        "train", "train", number, 4 * (number - 1), start=start, first_step=first_step,
        episodes=1, **options,
    )  # fmt: skip


def write(folder, about: TracedUpdate, **changes) -> None:
    made = episode(about, 0, **changes)
    files.write_update(folder / "trace", about, [made.to_json()])


def test_a_run_is_read_as_it_was_written(tmp_path):
    made_up_run(tmp_path, updates=10, per_update=2)
    episodes = list(read_trace(tmp_path))
    keys = [e.key for e in episodes]
    trained = [f"train-{u}-{r}" for u in range(1, 11) for r in (0, 1)]
    assert keys == [*trained, "eval-80-0.0", "eval-80-1.0"]
    assert list(read_trace(tmp_path / "trace")) == episodes
    first = episodes[0]
    assert first.update.level == "turn"
    assert first.update.clip_range == [0.2, 0.2]


def test_hostile_text_and_odd_numbers_come_back(tmp_path):
    made = add_hostile(tmp_path, 3)
    (read,) = read_trace(tmp_path)
    assert read.text == made.text == "prompt " + "".join(HOSTILE) + "end\n\n"
    assert (read.error, read.environment, read.prompt_id) == (made.error,) * 3
    assert read.score == math.inf
    assert read.turn_rewards == [-math.inf]
    assert math.isnan(next(iter(read.rewards.values())))
    assert read.advantages == pytest.approx(made.advantages, rel=1e-5)
    assert read.clipped == made.clipped


def test_a_resumed_run_leaves_nothing_of_what_it_does_again(tmp_path):
    """Killed in update 5, resumed from step 8, that is after update 2, and so far in update 4."""
    for number in range(1, 6):
        for process in (0, 1):
            write(tmp_path, update(number, process=process), score=0.0)
    held = TracedUpdate("eval", "eval", 2, 8, start=1, first_step=0, episodes=1)
    write(tmp_path, held, score=0.5)
    write(tmp_path, replace(held, update=3, global_step=12), score=0.5)
    for number in (3, 4):
        write(tmp_path, update(number, start=2, first_step=8), score=1.0)
    found = [(e.update.phase, e.update.update, e.score) for e in read_trace(tmp_path)]
    before = [("train", n, 0.0) for n in (1, 1, 2, 2)]
    assert found == [*before, ("eval", 2, 0.5), ("train", 3, 1.0), ("train", 4, 1.0)]


def test_damaged_files_are_left_out(tmp_path, caplog, capsys):
    made_up_run(tmp_path, updates=4, per_update=2)
    first, second, third, _ = sorted((tmp_path / "trace").iterdir())
    first.write_bytes(first.read_bytes()[:40])
    lines = gzip.decompress(second.read_bytes())
    second.write_bytes(gzip.compress(lines[:-50]))
    third.write_bytes(b"")
    (tmp_path / "trace" / ".train-0000009-rank0.jsonl.gz.1.writing").write_bytes(b"half")
    assert [e.key for e in read_trace(tmp_path)] == ["train-2-0", "train-4-0", "train-4-1"]
    assert caplog.text.count("is damaged and left out") == 3
    page = tmp_path / "trace.html"
    assert main(["trace", str(tmp_path)]) == 0
    assert "3 of 4 episodes, 0.1 MiB" in capsys.readouterr().out
    assert page.read_text().count('id="episode-') == 3
    assert "episodes from 2 updates and 0 evaluations" in page.read_text()


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(self, data):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path, update(1))
    assert list((tmp_path / "trace").iterdir()) == []
