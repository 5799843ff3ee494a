"""Where logs are reported to: the default stays on this machine, and every integration can take them."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import TrainerCallback
from transformers.integrations import TrackioCallback

from tests.scripted import scripted_trainer
from trl_stppo import PPOConfig
from trl_stppo.trainer.watching import reporting

ODD = {
    "rewards/<lambda>/mean": [math.nan],  # upstream makes None of it
    "clip ‖C‖ (x)/ü": [0.5],
    "too/large": [math.inf],
}


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    for name in reporting.TRACKIO_REMOTE:
        monkeypatch.delenv(name, raising=False)


def settled(**settings):
    args = SimpleNamespace(
        **{
            "report_to": "auto",
            "trackio_space_id": None,
            "trackio_static_space_id": None,
            **settings,
        }
    )
    reporting.resolve_report_to(args)
    return args.report_to, args.trackio_static_space_id


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (None, ("none", None)),
        ("0.0.6", ("none", None)),  # does not know what upstream passes
        ("0.21.1", (["trackio"], False)),
        ("1.0rc1", (["trackio"], False)),
    ],
)
def test_the_default_is_trackio_where_it_is_installed(version, expected, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if version is None else name)
    monkeypatch.setattr(reporting, "version", lambda name: version)
    assert settled() == expected


def test_the_default_never_leaves_the_machine_and_opens_no_dashboard(monkeypatch):
    monkeypatch.setattr(reporting, "_usable_trackio", lambda: True)
    assert settled() == (["trackio"], False)
    assert settled(trackio_static_space_id="me/space") == (["trackio"], "me/space")
    assert settled(trackio_space_id="me/space") == ("none", None)
    monkeypatch.setattr(reporting, "is_in_notebook", lambda: True)
    assert settled() == ("none", None)
    monkeypatch.undo()
    monkeypatch.setattr(reporting, "_usable_trackio", lambda: True)
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    assert settled() == ("none", None)


@pytest.mark.parametrize("wish", ["none", "tensorboard", ["wandb", "trackio"], "all"])
def test_a_wish_is_left_alone(wish, monkeypatch):
    monkeypatch.setattr(reporting, "_usable_trackio", lambda: True)
    assert settled(report_to=wish) == (wish, None)


def test_a_configuration_resolves_it(monkeypatch):
    monkeypatch.setattr(reporting, "_usable_trackio", lambda: True)
    args = PPOConfig(output_dir="out", use_cpu=True, bf16=False)
    assert (args.report_to, args.trackio_static_space_id) == (["trackio"], False)
    again = PPOConfig(output_dir="out", use_cpu=True, bf16=False, report_to=args.report_to)
    assert again.report_to == ["trackio"]


def test_a_name_that_nobody_knows_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(ValueError, match=r"nobody is not supported, only .*trackio, wandb"):
        scripted_trainer(tmp_path, report_to="nobody")


class Seen(TrainerCallback):
    """A callback of the user's."""

    def __init__(self) -> None:
        self.seen: list[dict] = []

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        self.seen.append(dict(logs))


class Integration(Seen):
    """Known as one of upstream's by where it is from."""

    __module__ = "transformers.integrations.of_a_test"


def test_integrations_get_numbers_only_and_the_history_everything(tmp_path):
    integration, own = Integration(), Seen()
    trainer, _ = scripted_trainer(tmp_path, callbacks=[integration, own])
    trainer._metrics["train"].update(ODD)
    trainer.train()
    entry, _ = trainer.state.log_history
    assert entry["rewards/<lambda>/mean"] is None
    assert entry["too/large"] == math.inf
    first, _ = integration.seen
    assert {*entry} - {*first} == {"rewards/<lambda>/mean", "too/large", "step"}
    assert all(isinstance(v, (int, float)) and math.isfinite(v) for v in first.values())
    assert {*entry} - {*own.seen[0]} == {"step"}, "the user's callbacks miss nothing"


def test_tensorboard(tmp_path, caplog):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer, _ = scripted_trainer(tmp_path, report_to="tensorboard", max_steps=2)
    trainer._metrics["train"].update({name: list(values) for name, values in ODD.items()})
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "incorrect" not in caplog.text
    (folder,) = (tmp_path / "runs").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    (logged, *_) = trainer.state.log_history
    (first, _) = events.Scalars("train/clip_bias/norm")
    assert first.value == pytest.approx(logged["clip_bias/norm"])
    assert "train/clip ‖C‖ (x)/ü" in events.Tags()["scalars"]


REPORTING = """
import socket, sys
for name in ("connect", "connect_ex"):
    def checked(self, address, original=getattr(socket.socket, name)):
        inside = self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1")
        assert inside, f"NETWORK {address}"
        return original(self, address)
    setattr(socket.socket, name, checked)
from tests import scripted
from tests.watch.test_report_to import ODD
if __name__ == "__main__":
    del scripted.DEFAULTS["report_to"]
    settings = {"report_to": sys.argv[2]} if sys.argv[2] else {}
    trainer, _ = scripted.scripted_trainer(sys.argv[1], max_steps=2, **settings)
    trainer._metrics["train"].update(ODD)
    trainer.train()
    print("REPORTED", ",".join(trainer.args.report_to))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow", "all", ""])
def test_a_training_that_reports_offline(name, tmp_path):
    """Each integration for itself, all that are installed, and the default."""
    if name not in ("all", ""):
        pytest.importorskip(name)
    places = {
        **{"HF_HOME": "hf", "WANDB_DIR": "wandb", "MLFLOW_TRACKING_URI": "mlruns"},
        **{"TMPDIR": "tmp", "TRACKIO_DIR": "hf/trackio"},
    }
    for place in places.values():
        if place != "mlruns":  # MLflow fills one that it makes itself
            (tmp_path / place).mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        **{key: str(tmp_path / place) for key, place in places.items()},
        **{"WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true", "HF_HUB_OFFLINE": "1"},
    }
    script = tmp_path / "report.py"
    script.write_text(REPORTING)
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "out"), name],
        **{"env": {**environment, "PYTHONPATH": str(root)}, "cwd": tmp_path},
        **{"capture_output": True, "text": True, "timeout": 300},
    )
    printed = result.stdout + result.stderr
    assert result.returncode == 0, printed
    assert "NETWORK" not in printed
    assert "attempting to log a value" not in printed, printed
    if name == "trackio" or (name == "" and importlib.util.find_spec("trackio")):
        assert "REPORTED trackio" in printed
        assert list((tmp_path / "hf").rglob("*.db")) != []


def test_trackio_is_open_before_an_evaluation_that_comes_before_the_training(tmp_path):
    class Opened(TrackioCallback):
        def __init__(self):  # without the package
            self._initialized, self.at = False, []

        def setup(self, args, state, model, **kwargs):
            self._initialized = True
            self.at.append(state.global_step)

        on_train_begin = on_log = on_train_end = TrainerCallback.on_log

    opened = Opened()
    trainer, _ = scripted_trainer(tmp_path, callbacks=[opened], max_steps=2, staleness=0.0)
    trainer.eval_dataset = trainer.train_dataset
    trainer.evaluate()
    assert opened.at == [0], "TRL's profiling writes to it while the episodes are played"
    trainer.evaluate()
    assert opened.at == [0]
