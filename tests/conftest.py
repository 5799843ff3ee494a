"""The surroundings of all tests, before anything else is imported, and their order."""

from tests.kit import surroundings

surroundings.take()

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit import shortcuts, warm

# Imports make objects that stay, among which the collector would look for garbage again and again.
gc.disable()


def pytest_collection_finish() -> None:
    """Hides what the imports have made from the collector, and saves upstream what it knows by now."""
    gc.freeze()
    gc.enable()
    shortcuts.take()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """By file, but all that start warm processes in one: imports take their parent eight seconds."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByParent(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "warm" if file in started else file

    starts = re.compile(r"^from tests\.kit(\.launch import| import .*\bwarm\b)", re.MULTILINE)
    root = Path(config.rootpath)
    files = [path for path in root.glob("tests/**/test_*.py") if starts.search(path.read_text("utf-8"))]
    started = {path.relative_to(root).as_posix() for path in files}
    return ByParent(config, log)


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
    from tests.kit.script_kit import scripts

    with scripts() as module:
        yield module
