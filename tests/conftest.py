"""Offline and on the CPU, before anything is imported that could look elsewhere."""

import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TRL_EXPERIMENTAL_SILENCE="1",
    TOKENIZERS_PARALLELISM="false",
)

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def script():
    """Imports a module of scripts/ or benchmarks/; all are forgotten again after the test file."""
    from tests.script_kit import scripts

    with scripts() as module:
        yield module
