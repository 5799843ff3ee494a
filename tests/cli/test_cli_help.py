"""Help of the console script: quick, true to the parsers, short first and complete on request."""

import re
import shlex
import subprocess
import sys
from dataclasses import fields

import pytest

from tests.docs_kit import table_rows
from tests.docs_scripts import flags_of_command, given_flags, launcher_flags
from tests.script_kit import ROOT
from trl_stppo.cli.main import LAUNCHED, MODULES, main

QUICK = """
import sys
from trl_stppo.cli import main
for words in (["--help"], ["train", "-h"], ["env", "play", "--help"], ["env"], ["--version"], ["trian"],
        ["show", "--max_trun", "3"], ["env", "check", "a:b", "--stict"]):
    print(main(words), *({HEAVY!r} & set(sys.modules)), file=sys.stderr)
"""
HEAVY = {"torch", "transformers", "datasets", "accelerate", "huggingface_hub", "rich"}


def test_help_and_wrong_words_import_nothing_heavy():
    code = QUICK.replace("{HEAVY!r}", repr(HEAVY))
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("trl-stppo")]
    assert lines == ["0", "0", "0", "0", "0", "2", "2", "2"]
    assert re.search(r"^ +train +Train an agent\.$", result.stdout, re.MULTILINE)
    assert "usage: trl-stppo env play" in result.stdout
    assert re.search(r"^trl-stppo \d\S+ \(Python 3.*, torch 2", result.stdout, re.MULTILINE)


def test_the_overview_does_not_even_import_trl():
    code = "import sys, trl_stppo.cli as c; c.main([]); print({'trl', 'yaml'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("\nset()\n")


def test_the_module_is_the_script(capfd):
    done = subprocess.run(
        [sys.executable, "-m", "trl_stppo"], cwd=ROOT, capture_output=True, text=True
    )
    assert main(["--help"]) == done.returncode == 0
    assert done.stdout == capfd.readouterr().out


@pytest.mark.parametrize("command", MODULES)
def test_examples_are_of_flags_that_exist(command, capsys):
    assert main([*command.split(), "--help"]) == 0
    shown, _, examples = capsys.readouterr().out.partition("\nexamples:\n")
    assert shown.startswith(f"usage: trl-stppo {command} ")
    known = flags_of_command(command) | (launcher_flags() if command in LAUNCHED else set())
    for example in examples.splitlines():
        assert f"{example} ".startswith(f"    trl-stppo {command} ")
        assert given_flags(shlex.split(example, comments=True)) <= known | {"--accelerate_config"}
    assert 1 <= len(examples.splitlines()) <= 4


def test_help_all_has_every_flag_once_in_its_group(capsys):
    from trl import GRPOConfig

    from trl_stppo import STPPOConfig

    assert main(["train", "--help_all"]) == 0
    headings = ("options", "task", "STPPO", "PPO", "model (TRL)", "GRPO (TRL)")
    headings += ("training (TRL and transformers)", "examples")
    shown = capsys.readouterr().out
    _, *texts = re.split(rf"\n(?:{'|'.join(map(re.escape, headings))}):\n", shown)
    parts = dict(zip(headings, texts, strict=True))
    found = {
        heading: re.findall(r"^  --(\w+)", text, re.MULTILINE) for heading, text in parts.items()
    }
    flags = [flag for group in found.values() for flag in group]
    assert len(flags) == len(set(flags))
    assert {spec.name for spec in fields(STPPOConfig) if spec.init} <= set(flags)
    assert {"variant", "clip_bias_power", "stabilizers"} <= set(found["STPPO"])
    assert {"max_turns", "gamma", "cliprange"} <= set(found["PPO"])
    assert {"environment", "dry_run", "dataset_name"} <= set(found["task"])
    assert {"lora_r", "dtype"} <= set(found["model (TRL)"])
    assert "vllm_mode" in found["GRPO (TRL)"]
    assert "seed" in found["training (TRL and transformers)"]
    assert set(found["GRPO (TRL)"]) <= {spec.name for spec in fields(GRPOConfig)}
    assert "(default st-ppo)" in parts["STPPO"]
    assert "zero2" in parts["options"]


def test_the_docs_name_every_command_by_its_summary(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    rows = list(table_rows(ROOT / "docs" / "configuration.md", "Commands"))[: len(MODULES)]
    assert [row[0].strip("`") for row in rows] == list(MODULES)
    assert main(["--help"]) == 0
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for name, summary, _ in rows:
        assert f"{name.strip('`')} {summary}" in printed
