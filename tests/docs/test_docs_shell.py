"""Commands in shell blocks exist with the flags and files that the pages give them; YAML is read."""

import pytest
import yaml

from tests.kit import docs_scripts
from tests.kit.docs_kit import PAGES, blocks

ALL = [block for page in PAGES for block in blocks(page)]
SHELL = [block for block in ALL if block.language in ("bash", "shell", "console")]
YAML = [block for block in ALL if block.language == "yaml"]


@pytest.fixture(autouse=True)
def _own_modules(script):
    """Scripts import their neighbours by bare names; those are forgotten again."""


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.where)
def test_commands_and_flags_exist(block):
    check_all(block.code)


def check_all(code):
    found = list(docs_scripts.commands(code))
    assert found, "no command in the block"
    for words in found:
        docs_scripts.check(words)


@pytest.mark.parametrize("block", YAML, ids=lambda block: block.where)
def test_yaml_is_a_configuration(block, tmp_path, monkeypatch):
    """Keys are options of training; those of accelerate's own files are known to accelerate."""
    settings = yaml.safe_load(block.code)
    assert isinstance(settings, dict)
    if "compute_environment" in settings or "distributed_type" in settings:
        return
    from trl import TrlParser

    from trl_stppo.cli.flags import TrainArguments, flag_types

    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(block.code)
    words = ["--config", str(path), "--output_dir", "run", "--use_cpu", "true", "--bf16", "false"]
    TrlParser(flag_types(TrainArguments)).parse_args_and_config(words)
