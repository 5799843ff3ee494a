"""Each example of a help page does what it says, in a folder that has what it names."""

import io
import json
import re
import shlex
import shutil
import webbrowser
from http.server import ThreadingHTTPServer

import pytest

from tests.kit.script_kit import AGENT
from tests.kit.trace_kit import made_up_run
from trl_stppo.cli.main import FIRST_STEPS, MODULES, documented, main

RUN = """
model_name_or_path: base
environment: my_env:MyEnv
dataset_name: data
output_dir: runs/new
max_turns: 2
max_completion_length: 40
per_device_train_batch_size: 4
num_mini_batches: 1
num_ppo_epochs: 1
max_steps: 2
logging_steps: 1
use_cpu: true
bf16: false
report_to: none
"""
# Takes more than a few seconds: what trains.
SLOW = re.compile(r"train (?!.*--dry_run)")


def examples():
    pages = [FIRST_STEPS, *(documented(command)[2] for command in MODULES)]
    lines = re.findall(r"^ +trl-stppo (.+)$", "\n".join(pages), re.MULTILINE)
    for line in dict.fromkeys(lines):
        if not line.startswith("COMMAND"):
            yield pytest.param(line, marks=pytest.mark.slow if SLOW.match(line) else ())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where somebody types: an environment, rows, a configuration and runs."""
    here = tmp_path_factory.mktemp("typed")
    (here / "my_env.py").write_text("from tests.cli.test_cli_env_check import Clean as MyEnv\n")
    rows = "\n".join([json.dumps({"prompt": [{"role": "user", "content": "Go."}]})] * 16)
    (here / "data").mkdir()
    for file in ("rows.jsonl", "data/train.jsonl", "data/test.jsonl"):
        (here / file).write_text(rows)
    (here / "run.yaml").write_text(RUN)
    (here / "base").symlink_to(AGENT)
    for name in ("demo", "mine", "agent", "ppo", "st-ppo"):
        made = shutil.copytree(AGENT, here / "runs" / name)
        entries = [{"step": i, "episode/success_rate": i / 4} for i in range(4)]
        first = {"format": 1, "settings": {}, "steps_per_rollout": 1}
        (made / "metrics.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in [first, *entries]))
    made_up_run(here / "runs" / "demo")
    return here


def interrupted(server):
    raise KeyboardInterrupt


@pytest.mark.parametrize("line", examples())
def test_it_works(folder, line, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(webbrowser, "open", lambda address: None)
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("right\n"))
    line = line.partition(" && ")[0]
    code = main(shlex.split(line, comments=True))
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert shown.out
