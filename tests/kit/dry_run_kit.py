"""The dry run as a fixture; a conftest imports it."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
import yaml

from tests.kit.script_kit import ROOT
from trl_stppo.cli.main import main


@pytest.fixture
def dry_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    """Runs the dry run of a file; gives the exit code and what was printed, table lines joined."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were loaded")

    for name in ("AutoModelForCausalLM", "AutoModelForSequenceClassification"):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", refuse)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str) -> tuple[int, str]:
        code = main(["train", *words, "--dry-run"])
        return code, re.sub(r"[ │]+", " ", "".join(capsys.readouterr()))

    return run


def processes_of(path: Path) -> str:
    """The number of processes with which a configuration's own first lines launch it."""
    found = re.search(r"--config_file (\S+)", path.read_text())
    return str(yaml.safe_load((ROOT / found[1]).read_text())["num_processes"]) if found else "1"
