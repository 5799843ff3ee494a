"""Every integration of `report_to` can take the logs."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import TrainerCallback

from tests.kit.scripted import scripted_trainer

ODD = {
    "rewards/<lambda>/mean": [math.nan],
    "clip ‖C‖ (x)/ü": [0.5],
    "too/large": [math.inf],
}


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


REPORTING = """
import socket, sys
for name in ("connect", "connect_ex"):
    def checked(self, address, original=getattr(socket.socket, name)):
        inside = self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1")
        assert inside, f"NETWORK {address}"
        return original(self, address)
    setattr(socket.socket, name, checked)
from tests.kit import scripted
from tests.watch.test_report_to import ODD
if __name__ == "__main__":
    del scripted.DEFAULTS["report_to"]
    trainer, _ = scripted.scripted_trainer(sys.argv[1], max_steps=2, report_to="all")
    trainer._metrics["train"].update(ODD)
    trainer.train()
    print("REPORTED", ",".join(trainer.args.report_to))
"""


@pytest.mark.slow
def test_a_training_reports_offline_to_all_that_is_installed(tmp_path):
    places = {
        **{"HF_HOME": "hf", "WANDB_DIR": "wandb", "MLFLOW_TRACKING_URI": "mlruns"},
        **{"TMPDIR": "tmp", "TRACKIO_DIR": "hf/trackio"},
    }
    for place in places.values():
        if place != "mlruns":
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
        [sys.executable, str(script), str(tmp_path / "out")],
        **{"env": {**environment, "PYTHONPATH": str(root)}, "cwd": tmp_path},
        **{"capture_output": True, "text": True, "timeout": 300},
    )
    printed = result.stdout + result.stderr
    assert result.returncode == 0, printed
    assert "NETWORK" not in printed
    assert "attempting to log a value" not in printed, printed
    assert "REPORTED" in printed
