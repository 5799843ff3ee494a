"""The dry run as a fixture."""

import re

import pytest
import transformers

from trl_stppo.cli import train


@pytest.fixture
def dry_run(capsys, monkeypatch):
    """Runs the dry run of a file; gives the exit code and what was printed, table lines joined."""

    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")

    for name in ("AutoModelForCausalLM", "AutoModelForSequenceClassification"):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", refuse)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str) -> tuple[int, str]:
        code = train.run([*words, "--dry-run"])  # the same as --dry_run
        return code, re.sub(r"[ │]+", " ", capsys.readouterr().out)

    return run
