"""Python blocks of every page run, in order, on this machine; those that cannot are few and compile."""

import ast
import shutil
import sys
from types import ModuleType

import pytest

from tests.kit.docs_kit import PAGES, ROOT, blocks
from tests.kit.docs_offline import make_short, run_block

PYTHON = {page: [b for b in blocks(page) if b.language in ("python", "py")] for page in PAGES}
WITH_CODE = [page for page, found in PYTHON.items() if any(not b.not_run for b in found)]
# page -> blocks that need what no test machine has.
NOT_RUN = {"evaluation.md": 2, "serving.md": 1, "agents.md": 1}


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    make_short(monkeypatch)
    before = set(sys.modules)
    module = ModuleType("page")  # a module, so that what it defines can be pickled
    monkeypatch.setitem(sys.modules, "page", module)
    try:
        for block in PYTHON[page]:
            if block.not_run is None:
                run_block(block, vars(module))
    finally:
        for name in set(sys.modules) - before:
            if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
                del sys.modules[name]
        shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_that_are_not_run_are_python_and_few(page):
    left_out = [block for block in PYTHON[page] if block.not_run]
    for block in left_out:
        ast.parse(block.code)
    assert len(left_out) == NOT_RUN.get(page.name, 0), [block.where for block in left_out]
