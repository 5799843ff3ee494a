"""`scripts/first_gpu_run.sh` gets to its report, in small and without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.kit.script_kit import ROOT

# The agent of the demo in place of one from the Hub, two rollouts, and no time for measurements.
FLAGS = {
    "model_name_or_path": "scripts/assets/search-agent",
    "total_episodes": 256, "eval_episodes": 8, "max_turn_tokens": 12, "max_completion_length": 256,
    "use_cpu": True, "bf16": False, "dtype": "float32", "lora_r": 4,
}  # fmt: skip


def test_it_ends_with_a_report_that_names_no_path(tmp_path: Path) -> None:
    flags = [part for name, value in FLAGS.items() for part in (f"--{name}", str(value))]
    own = {"VENV": sys.prefix, "FOLDER": str(tmp_path / "run"), "GPU_CHECK": "--quick --only ddp"}
    command, env = ["bash", "scripts/first_gpu_run.sh", *flags], {**os.environ, **own}
    options = {"cwd": ROOT, "env": {**env, "PYTHONPATH": str(ROOT)}, "timeout": 600}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "run" / "report.json").read_text()
    report = json.loads(text)
    assert report["gpu"]["rows"] == {"ddp": {"skipped": "needs 2 GPUs"}}
    assert {"before", "after"} <= set(report["evaluation"])
    assert [step["step"] for step in report["last_steps"]] == [8, 16]
    assert str(tmp_path) not in text
    assert str(ROOT) not in text
