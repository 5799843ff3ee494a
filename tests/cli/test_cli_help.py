"""Help of the console script: quick, true to the parsers, short first and complete on request."""

import argparse
import re
import shlex
import subprocess
import sys
from dataclasses import fields

import pytest

from tests.script_kit import ROOT
from trl_stppo.cli.main import MODULES, PARSED, main
from trl_stppo.cli.pages import PAGES

HEAVY = ("torch", "trl", "transformers", "datasets", "accelerate", "yaml", "rich")
QUICK = f"""
import sys
from trl_stppo.cli import main
for words in (["--help"], ["train", "-h"], ["env", "play", "--help"], ["env"], ["--version"], ["trian"]):
    print(main(words), *({set(HEAVY)!r} & set(sys.modules)), file=sys.stderr)
"""


def flags_of(command: str) -> set[str]:
    """All flags that a command takes, the launcher's too."""
    from importlib import import_module

    from trl_stppo.cli import estimate, launch

    if command in PARSED:
        parser = argparse.ArgumentParser()
        import_module(PARSED[command]).add_arguments(parser)
        options = [option for action in parser._actions for option in action.option_strings]
        return {option.lstrip("-") for option in options}
    from trl_stppo.cli.flags import FlagParser, flag_name

    names = FlagParser(import_module(MODULES[command]).flag_types_of([])).names()
    if command in ("train", "evaluate", "estimate"):
        names |= launch.launch_flags() | {"config"}
    return names | (
        {flag_name(flag) for flag in estimate.SHORT} if command == "estimate" else set()
    )


def test_help_imports_nothing_heavy():
    result = subprocess.run([sys.executable, "-c", QUICK], cwd=ROOT, capture_output=True, text=True)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("trl-stppo")]
    assert lines == ["0", "0", "0", "0", "0", "2"]
    assert "commands:\n  train " in result.stdout
    assert "usage: trl-stppo env play" in result.stdout
    assert re.search(r"^trl-stppo \d\S+ \(Python 3.*, torch 2", result.stdout, re.MULTILINE)


def test_the_module_is_the_script(capfd):
    done = subprocess.run(
        [sys.executable, "-m", "trl_stppo"], cwd=ROOT, capture_output=True, text=True
    )
    assert main(["--help"]) == done.returncode == 0
    assert done.stdout == capfd.readouterr().out


@pytest.mark.parametrize("command", PAGES)
def test_pages_teach_flags_that_exist(command):
    page, known = PAGES[command], flags_of(command)
    assert 4 <= len(page.first) <= 6
    assert all(f"{example} ".startswith(f"trl-stppo {command} ") for example in page.examples)
    lines = [*page.first, *(shlex.join(shlex.split(e, comments=True)) for e in page.examples)]
    for flag in re.findall(r"--(\w+)", " ".join(lines)):
        assert flag in known, flag
    assert max(map(len, page.text(command).splitlines())) <= 100


def test_every_command_has_a_page():
    assert set(PAGES) == {*MODULES, *PARSED}


def test_help_all_has_every_flag_once_in_its_group(capsys):
    from trl import GRPOConfig

    from trl_stppo import STPPOConfig
    from trl_stppo.cli.all_flags import ORDER

    assert main(["train", "--help_all"]) == 0
    shown = capsys.readouterr().out
    headings = "|".join(map(re.escape, ORDER))
    texts = re.split(rf"\n(?:{headings}):\n", shown)[1:]
    parts = dict(zip(ORDER, texts, strict=True))
    found = {
        heading: re.findall(r"^  --(\w+)", text, re.MULTILINE) for heading, text in parts.items()
    }
    flags = [flag for group in found.values() for flag in group]
    assert len(flags) == len(set(flags))
    assert {spec.name for spec in fields(STPPOConfig) if spec.init} <= set(flags)
    assert {"variant", "clip_bias_power", "clip_bias_target"} <= set(found["STPPO"])
    assert {"max_turns", "gamma", "cliprange"} <= set(found["PPO"])
    assert {"environment", "dry_run", "dataset_name"} <= set(found["task"])
    assert {"lora_r", "dtype"} <= set(found["model (TRL)"])
    assert "vllm_mode" in found["GRPO (TRL)"]
    assert "seed" in found["training (TRL and transformers)"]
    assert set(found["GRPO (TRL)"]) <= {spec.name for spec in fields(GRPOConfig)}
    assert "(default st-ppo)" in parts["STPPO"]
    assert "zero2" in shown.partition("launcher:")[2]


@pytest.mark.parametrize("command", PARSED)
def test_commands_of_other_parts_explain_themselves(command, capsys):
    assert main([*command.split(), "--help_all"]) == 0
    assert f"usage: trl-stppo {command}" in capsys.readouterr().out


def test_the_docs_show_what_is_printed(capsys):
    text = (ROOT / "docs" / "cli.md").read_text()
    assert main(["--help"]) == 0
    assert capsys.readouterr().out in text
    words = "train --max_turn 3 --init_kl_coef 0.1 --models a"
    assert main(words.split()) == 2
    assert capsys.readouterr().err in text
