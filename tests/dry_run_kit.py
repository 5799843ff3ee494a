"""The dry run as a fixture; a conftest imports it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from tests.script_kit import LAUNCHES
from trl_stppo.cli import train


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
        code = train.run([*words, "--dry-run"])  # the same as --dry_run
        return code, re.sub(r"[ │]+", " ", capsys.readouterr().out)

    return run


def launcher_of(path: Path) -> list[str]:
    """The flag for the file that a configuration's own first lines launch it with."""
    found = re.search(r"--accelerate_config (\w+)", path.read_text())
    return ["--dry_run_accelerate_config", str(LAUNCHES / f"{found[1]}.yaml")] if found else []
