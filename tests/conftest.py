"""Offline and on the CPU, before anything is imported that could look elsewhere."""

import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TRL_EXPERIMENTAL_SILENCE="1",
    TOKENIZERS_PARALLELISM="false",
)

import gc
from collections.abc import Iterator

import pytest
import torch

from tests import shortcuts, warm


def pytest_collection_finish() -> None:
    """Hides what the imports have made from the collector, and saves upstream what it knows by now."""
    gc.freeze()
    shortcuts.take()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _no_warm_parent_stays() -> Iterator[None]:
    yield
    warm.end()


@pytest.fixture(scope="module")
def script():
    """Imports a module of scripts/ or benchmarks/; all are forgotten again after the test file."""
    from tests.script_kit import scripts

    with scripts() as module:
        yield module
