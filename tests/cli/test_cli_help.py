"""Help of the console script: true to the parsers; where TRL's flags are not read, without heavy imports."""

import dataclasses
import re
import shlex
import subprocess
import sys

import pytest

from tests.kit.docs_scripts import flags_of_command, given_flags
from tests.kit.script_kit import ROOT
from trl_stppo import STPPOConfig
from trl_stppo.cli.main import MODULES, TRAINERS, main

OWN = [command for command in MODULES if command not in TRAINERS]
QUICK = """
import sys
from trl_stppo.cli import main
for words in WORDS:
    print(main(words), *({"torch", "trl", "transformers", "datasets"} & set(sys.modules)), file=sys.stderr)
"""


def test_help_trace_and_plot_import_neither_torch_nor_trl(tmp_path):
    helped = [[*command.split(), "--help"] for command in OWN]
    words = [[], ["--help"], ["--version"], ["env"], *helped, ["trian"]]
    words += [["trace", "nowhere"], ["plot", "nowhere"]]
    code = QUICK.replace("WORDS", repr(words))
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    lines = [line for line in done.stderr.splitlines() if re.match(r"\d", line)]
    assert lines == ["0"] * (4 + len(OWN)) + ["2", "1", "1"], done.stderr


@pytest.mark.parametrize("command", OWN)
def test_flags_of_the_help_exist(command, capsys):
    assert main([*command.split(), "--help"]) == 0
    shown, _, examples = capsys.readouterr().out.partition("\nexamples:\n")
    assert shown.startswith(f"usage: trl-stppo {command} ")
    known = flags_of_command(command) | {"--help", "--trace_episodes"}
    assert set(re.findall(r"(?<=[ (])--\w+", shown)) <= known
    for example in examples.splitlines():
        assert f"{example} ".startswith(f"    trl-stppo {command} ")
        assert given_flags(shlex.split(example, comments=True)) <= known
    assert 1 <= len(examples.splitlines()) <= 4


def test_help_of_a_training_has_every_flag(capsys):
    assert main(["train", "--help"]) == 0
    flags = set(re.findall(r"^  --(\w+)", capsys.readouterr().out, re.MULTILINE))
    assert {spec.name for spec in dataclasses.fields(STPPOConfig) if spec.init} <= flags
    assert {"environment", "dry_run", "dataset_name", "lora_r"} <= flags
