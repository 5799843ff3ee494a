"""What a command raises becomes a message and an exit code; a traceback only where it says more."""

import linecache
import signal

import pytest

from tests.kit.script_kit import ROOT
from trl_stppo.cli import train
from trl_stppo.cli.main import guarded, main
from trl_stppo.errors import CheckpointError
from trl_stppo.statistics import wilson_interval


def raising(error):
    def call():
        raise error

    return call


def ours(error):
    """The same, raised in the package."""
    scope = {"__name__": "trl_stppo.somewhere", "error": error}
    source = "def call():\n    raise error\n"
    linecache.cache["raised"] = (len(source), None, source.splitlines(True), "raised")
    exec(compile(source, "raised", "exec"), scope)
    return scope["call"]


@pytest.mark.parametrize(("call", "code", "traceback"), [
    (lambda: 0, 0, False),
    (lambda: 143, 143, False),
    (ours(CheckpointError("damaged")), 1, False),
    (ours(OSError("no space left")), 1, False),
    (raising(ValueError("of an environment")), 1, True),
    (ours(KeyError("a bug")), 1, True),
    (lambda: wilson_interval("a", 3), 1, True),
    (raising(KeyboardInterrupt()), 130, False),
    (raising(SystemExit(3)), 3, False),
    (raising(SystemExit("sorry")), 1, False),
    (raising(SystemExit()), 0, False),
])  # fmt: skip
def test_exit_codes(call, code, traceback, capsys):
    assert guarded(call) == code
    assert ("Traceback" in capsys.readouterr().err) == traceback


def test_a_training_that_a_signal_has_stopped_says_so(monkeypatch, tmp_path):
    """The trainer saves a checkpoint (tests/trainer/guards/test_signals.py); here is the code."""

    class Stopped:
        stop_signal = signal.SIGTERM

        def train(self, **given):
            pass

    monkeypatch.setattr(train, "make_trainer", lambda *parsed: Stopped())
    words = (
        "train --model_name_or_path a --dataset_name b --reward_funcs c:d --use_cpu --bf16 false"
    )
    assert main([*words.split(), "--output_dir", str(tmp_path)]) == 143


WORDS = ["--config", "scripts/configs/demo.yaml", "--environment_kwargs"]


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--hub_tokn=hf_" + "Planted7" * 4],
        ["train", "--max_turns=hf_" + "Planted7" * 4],
        ["train", "--dry_run", *WORDS, '{"api_key": "Planted7"'],
        ["train", *WORDS, '{"top_k": 3}', "--dry_run", "--dataset_name", "./http://me:Planted7@h"],
        ["plot", "http://me:Planted7@h/x"],
    ],
    ids=lambda words: words[1],
)
def test_no_message_repeats_a_secret(words, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(words) != 0
    told = capsys.readouterr()
    assert "Planted7" not in told.out + told.err
    assert "***" in told.out + told.err


def test_no_traceback_repeats_a_secret(capsys):
    assert guarded(raising(ValueError("401 for http://me:Planted7@h/?api_key=Planted7"))) == 1
    assert "401 for http://***@h/?api_key=***" in capsys.readouterr().err
