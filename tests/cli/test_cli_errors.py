"""What a command raises becomes a message and an exit code; a traceback only where it says more."""

import linecache
import signal

import pytest

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
    words = "train --model_name_or_path a --dataset_name b --reward_funcs c:d --use_cpu --bf16 false"
    assert main([*words.split(), "--output_dir", str(tmp_path)]) == 143
