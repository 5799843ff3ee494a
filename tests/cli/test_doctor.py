"""`trl-stppo doctor`: a miniature on the CPU, what fails, runs out or is missing, and the arithmetic."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from tests import warm
from trl_stppo.cli import doctor, doctor_report, doctor_rows, doctor_worker
from trl_stppo.cli.main import main
from trl_stppo.models.memory import GIB, Geometry, Setup

MACHINE = {"device": "A card", "devices": 1, "memory_gib": 24.0, "matrix_peak_tflops": 100.0}
MEASURED = {"predicted_gib": 9.0, "peak_allocated_gib": 10.0, "update_tflops": 40.0}


def tell(figures, code=0):
    """A program in place of a measurement."""
    return f"print({doctor_report.FOUND + json.dumps(figures)!r}); raise SystemExit({code})"


@pytest.fixture
def told(capsys, monkeypatch):
    """Runs the command; gives the exit code, the table's cells by name of the row, and the JSON.

    With `programs`, of one row each, these stand in place of the measurements.
    """

    def run(*words, programs=None, machine=MACHINE, missing=()):
        if programs is not None:

            def command(spec):
                row = next(
                    (name for name in programs if doctor.ROWS[name].items() <= spec.items()), None
                )
                return [sys.executable, "-c", programs[row] if row else tell(machine)]

            monkeypatch.setattr(doctor, "command_of", command)
            monkeypatch.setattr(doctor, "_version", lambda name: None if name in missing else "1")
            words = ("--only", *programs, *words)
        code = main(["doctor", *words])
        *text, last = capsys.readouterr().out.strip().splitlines()
        rows = [line.strip("| ").split(" | ") for line in text if line.startswith("| ")]
        cells = {line[0].partition(":")[0]: line for line in rows}
        return SimpleNamespace(code=code, cells=cells, json=json.loads(last), text="\n".join(text))

    return run


def test_a_miniature_of_all_of_it(told, monkeypatch, tmp_path):
    """Through the trainer, in processes of their own; what a CPU cannot show is named."""
    started = {**vars(subprocess), "Popen": warm.Process}
    monkeypatch.setattr(doctor, "subprocess", SimpleNamespace(**started))
    output = tmp_path / "doctor.md"
    names = ("full-2k", "qlora-2k", "sampler", "ddp", "vllm")
    found = told("--output", str(output), "--only", *names)
    assert found.code == 0, found.text
    assert (found.json["trl_stppo_doctor"], found.json["miniature"]) == (1, True)
    assert "**A miniature**" in found.text
    assert output.read_text().strip() == found.text.strip()
    rows = {row["name"]: row for row in found.json["rows"]}
    assert tuple(rows) == names
    for name in names[:2]:
        row = rows[name]
        assert (row["result"], row["optimizer_steps"], row["tokens"]) == ("measured", 2, 64)
        assert 0 < row["predicted_gib"] < 0.1
        for phase in ("rollout", "update"):
            assert row[f"{phase}_tokens_per_second"] > 0
        peak = found.json["machine"]["matrix_peak_tflops"]
        share = 100 * row["update_tflops"] / peak
        assert row["matrix_peak_percent"] == pytest.approx(share, rel=0.01)
        assert found.cells[name][5] == f"{row['rollout_tokens_per_second']:,.0f}"
    assert rows["sampler"]["sampler_tokens_per_second"] > 0
    assert rows["sampler"]["generate_tokens_per_second"] > 0
    assert rows["ddp"]["skipped"] == "needs 2 GPUs, there are 0"
    assert rows["vllm"]["result"].startswith("skipped: ")
    said = json.dumps(found.json)
    assert str(tmp_path) not in said
    assert os.getcwd() not in said
    assert platform.node() not in said


def test_a_row_that_crashes_costs_one_row(told):
    crash = "import os; print('a last word', flush=True); os.abort()"
    raised = tell({"failed": "ValueError: no"}, code=1)
    programs = {"full-2k": crash, "lora-2k": raised, "lora-4k": tell(MEASURED)}
    found = told(programs=programs)
    results = {name: cells[-1] for name, cells in found.cells.items()}
    assert found.code == 1
    assert results["full-2k"] == "failed: exit code -6: a last word"
    assert results["lora-2k"] == "failed: ValueError: no"
    assert found.cells["lora-4k"][1:5] == ["9.00", "10.00", "-10", ""]
    assert found.cells["lora-4k"][-2:] == ["40.0", "measured"]


def test_out_of_memory_is_a_finding(told):
    found = told(programs={"full-2k": tell({**MEASURED, "out_of_memory": True})})
    assert (found.code, found.cells["full-2k"][-1]) == (0, "out of memory")
    assert "predicted_off_percent" not in found.json["rows"][0], "a peak that was not reached"


SPEC = {**doctor.ROWS["full-2k"], **doctor.TINY, "miniature": True}


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
            0,
            "out_of_memory",
        ),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), 0, "out_of_memory"),
        (ValueError("wrong"), 1, "failed"),
    ],
)
def test_the_process_says_how_its_training_ended(error, code, kind, monkeypatch, tmp_path, capfd):
    def trainer(*args):
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor_worker, "made_trainer", trainer)
    assert doctor_worker.main([json.dumps(SPEC)]) == code
    last = capfd.readouterr().out.strip().splitlines()[-1]
    figures = json.loads(last.removeprefix(doctor_report.FOUND))
    assert kind in figures
    assert ("predicted_gib" in figures) == (code == 0)


def test_a_sampler_out_of_memory_is_a_finding_too(monkeypatch, capfd):
    def sampling(spec):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setitem(doctor_worker.MEASURES, "sampling", sampling)
    assert doctor_worker.main([json.dumps({"measure": "sampling"})]) == 0
    assert '{"out_of_memory": true}' in capfd.readouterr().out


def test_what_does_not_fit_is_not_begun(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor_worker, "FITS", 0.1)
    monkeypatch.setattr(doctor_worker, "made_trainer", None)
    assert "GiB expected, above 10% of " in doctor_worker.training(SPEC)["skipped"]


class Card:
    """What CUDA would say of a card, and in which order it was asked."""

    def __init__(self, **facts):
        self.asked, self.facts = [], {"total_memory": 24 * GIB, "name": "A card", **facts}

    def __getattr__(self, name):
        answers = {
            "is_available": True,
            "device_count": 1,
            "get_device_properties": SimpleNamespace(**self.facts),
            "mem_get_info": (20 * GIB, 24 * GIB),
            "max_memory_allocated": (3 if "reset_peak_memory_stats" in self.asked else 5) * GIB,
            "max_memory_reserved": 4 * GIB,
        }
        return lambda *args: (self.asked.append(name), answers.get(name))[1]


def test_peaks_of_a_card_are_those_of_the_training(monkeypatch, tmp_path):
    card, speeds = (
        Card(),
        [{f"perf/{p}_tokens_per_second": n for p in ("rollout", "update")} for n in (5, 9)],
    )
    trainer = SimpleNamespace(
        train=lambda: card.asked.append("train"),
        state=SimpleNamespace(log_history=speeds, global_step=4),
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor_worker, "torch", SimpleNamespace(cuda=card))
    monkeypatch.setattr(doctor_worker, "made_trainer", lambda *args: trainer)
    found = doctor_worker.training(SPEC)
    peaks = {
        name: found[f"{name}_gib"] for name in ("load_peak", "peak_allocated", "peak_reserved")
    }
    assert peaks == {"load_peak": 5, "peak_allocated": 3, "peak_reserved": 4}
    assert card.asked.index("reset_peak_memory_stats") < card.asked.index("train")
    assert found["update_tokens_per_second"] == 9, "the fastest"


def test_a_card_is_described(monkeypatch):
    card = Card(major=7, minor=5)
    version = SimpleNamespace(cuda="12.8", hip=None)
    monkeypatch.setattr(doctor_worker, "torch", SimpleNamespace(cuda=card, version=version))
    assert doctor_worker.machine({}) == {
        "device": "A card", "devices": 1, "memory_gib": 24, "free_gib": 20,
        "compute_capability": "7.5", "cuda": "12.8", "unfit": "this card computes no bfloat16",
    }  # fmt: skip


def test_the_budget_ends(told, monkeypatch, tmp_path):
    """In the middle of one, which ends with its children; the next is not begun."""
    monkeypatch.setattr(doctor_rows, "LEAST_SECONDS", 1)
    monkeypatch.setattr(doctor, "LARGEST_SHARE", 1)
    path = tmp_path / "pid"
    program = (
        "import pathlib, subprocess, sys, time;"
        "words = [sys.executable, '-c', 'import time; time.sleep(600)'];"
        f"child = subprocess.Popen(words, start_new_session=True); pathlib.Path({str(path)!r})"
        ".write_text(str(child.pid)); time.sleep(600)"
    )
    found = told("--budget_minutes", "0.1", programs={"full-2k": program, "lora-2k": program})
    assert found.code == 0
    first, second = (row["skipped"] for row in found.json["rows"])
    assert first == "its share of the time was used up"
    assert second == "no time left"
    pid, ends = int(path.read_text()), time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_one_row_cannot_take_all_of_the_budget(told, monkeypatch):
    monkeypatch.setattr(doctor_rows, "LEAST_SECONDS", 0)
    monkeypatch.setattr(doctor, "LARGEST_SHARE", 0.2)
    found = told("--budget_minutes", "0.1", programs={"full-2k": "import time; time.sleep(600)"})
    assert "was used up" in found.cells["full-2k"][-1]
    assert found.json["budget_seconds"] == 6
    limits = []
    monkeypatch.setattr(doctor, "measured", lambda spec, until: limits.append(until) or MACHINE)
    before = time.monotonic()
    told("--budget_minutes", "100", programs={"full-2k": ""})
    machine, row = limits
    assert machine - before >= 6000
    assert row - before < 6000 / 2


def test_what_is_not_installed_is_named_and_skipped(told):
    needs = {"qlora-2k": "bitsandbytes", "flash-4k": "flash-attn", "vllm": "vllm"}
    found = told(programs=dict.fromkeys(needs, tell({})), missing=needs.values())
    assert found.code == 0
    assert "- not installed: bitsandbytes, vllm, flash-attn" in found.text
    skipped = {row["name"]: row["skipped"] for row in found.json["rows"]}
    assert skipped == {row: f"{package} is not installed" for row, package in needs.items()}


def test_a_card_without_bfloat16_and_a_machine_that_cannot_be_asked(told):
    programs = {"full-2k": tell(MEASURED)}
    old = told(programs=programs, machine={"devices": 1, "unfit": "this card computes no bfloat16"})
    assert (old.code, old.cells["full-2k"][-1]) == (0, "skipped: this card computes no bfloat16")
    lost = told(programs=programs, machine={"failed": "no driver"})
    assert (lost.code, "failed no driver" in lost.text) == (1, True)


def test_one_process_sees_one_card_and_two_are_launched(told, monkeypatch):
    """A trainer that sees two in one process would share a batch out among them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    seen = "import json, os; seen = os.environ['CUDA_VISIBLE_DEVICES'];"
    seen += f"print({doctor_report.FOUND!r} + json.dumps({{'failed': seen}}))"
    command = doctor.command_of({**doctor.ROWS["ddp"], "miniature": False})
    assert command[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    found = told(programs={"full-2k": seen, "ddp": seen}, machine={**MACHINE, "devices": 2})
    assert [row["failed"] for row in found.json["rows"]] == ["3", "3,5"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--only qlora qlroa", "`--only qlroa`: there is no such measurement. Known are full-2k, "),
        ("--budget_minutes 0", "`--budget_minutes 0`: must be above 0."),
        ("--budget_minutes nan", "`--budget_minutes nan`: must be above 0."),
        ("--output no/such/table.md", "`--output no/such/table.md`: there is no folder no/such."),
    ],
)
def test_wrong_words_are_told_before_anything_runs(words, message, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "measured", None)
    assert main(["doctor", *words.split()]) == 2
    assert message in capsys.readouterr().err


# ------------------------------------------------------------------------- arithmetic

SHAPE = Geometry(
    hidden=4, intermediate=8, layers=2, vocab=10, query=4, key=2, parameters=140, linear=100,
    widths=0, largest=0,
)  # fmt: skip


def test_operations_of_a_token_by_hand():
    """Weights 100 and a head of 40; attention 3 * 2 * 2 layers * 4 wide * 5 tokens = 240 a side."""
    full = Setup(SHAPE, 0, 0, 0, full=True, critic_full=True)
    assert doctor_report.train_flops(full, 5) == 6 * 140 + 240 + 6 * 100 + 240
    assert doctor_report.train_flops(Setup(SHAPE, 0, 0, 0), 5) == 4 * 140 + 240 + 4 * 100 + 240


def test_percent_off_and_share_of_the_peak_by_hand():
    assert doctor_report.percent_off(9, 12) == pytest.approx(-25)
    assert doctor_report.percent_off(15, 12) == pytest.approx(25)
    done = doctor_report.completed({"update_tflops": 30.0}, 120.0)
    assert done["matrix_peak_percent"] == pytest.approx(25)
    assert "matrix_peak_percent" not in doctor_report.completed({"update_tflops": 30.0}, None)


def test_an_error_tells_neither_machine_nor_paths(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "secret-box")
    said = doctor_report.private(
        "OSError: /home/me/x.py, ~/a/b and\n C:\\Users\\me on secret-box: 3/4 of 2 GiB"
    )
    assert said == "OSError: PATH, PATH and PATH on HOST: 3/4 of 2 GiB"
