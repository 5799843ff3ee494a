"""Python blocks of every page run, in order, on this machine; those that cannot are few and compile.

A page is tested as its readers meet it: its blocks run in order in one namespace, in an empty folder. Three
things are replaced, and nothing else: names of the Hub by what is on this machine (`NAMES`), long loops by
short ones (`SHORTER`), and configurations by ones that are first made as the page has them and then as
short runs (`make_short`). A block that begins with `# <file>.py` is also saved to that file, as its reader
is told to do.
"""

import ast
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import trl_stppo
from tests.kit.docs_kit import PAGES, ROOT, Block, blocks
from tests.kit.script_kit import AGENT

PYTHON = {page: [b for b in blocks(page) if b.language in ("python", "py")] for page in PAGES}
WITH_CODE = [page for page, found in PYTHON.items() if any(not b.not_run for b in found)]
# What pages load from the Hub -> what stands for it here.
NAMES = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": AGENT,
    "Qwen/Qwen2.5-0.5B-Instruct": AGENT,
    "Qwen/Qwen2.5-1.5B-Instruct": AGENT,
    "Qwen/Qwen2.5-3B-Instruct": AGENT,
    "Qwen/Qwen2.5-7B-Instruct": AGENT,
}
# Code of pages -> what runs in its place.
SHORTER = {"tutorial.md": {"range(300)": "range(3)", "games * 40": "games"}}
FILE = re.compile(r"# ([\w/]+\.py)\n")


class _Local(ast.NodeTransformer):
    """Puts local names in place of the Hub's."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if isinstance(node.value, str) and node.value in NAMES:
            return ast.copy_location(ast.Constant(NAMES[node.value]), node)
        return node


def _small(given: dict[str, Any]) -> dict[str, Any]:
    """What a short run on a CPU has in place of the page's settings."""
    parts = given.get("num_mini_batches") or 1
    steps = {"total_episodes": None, "max_steps": 1, "warmup_steps": 0}
    sizes = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    # Turns of unbounded length would fill the whole episode.
    most = 64 if given.get("max_turn_tokens") else 12
    longest = min(given.get("max_completion_length") or given.get("response_length") or most, most)
    small = steps | sizes | {"gradient_accumulation_steps": parts, "max_completion_length": longest}
    small |= {"response_length": None, "num_generations_eval": 1, "steps_per_generation": None}
    small |= {"max_turns": min(given.get("max_turns") or 2, 3), "num_ppo_epochs": 1}
    small |= {"gradient_checkpointing": False, "optim": "adamw_torch", "disable_tqdm": True}
    small |= {"vllm_mode": "colocate", "use_vllm": False, "logging_steps": 1}
    if "num_generations" in given and given["num_generations"] > 1:
        small |= {"num_generations": 2}
    if given.get("eval_strategy", "no") != "no":
        small |= {"eval_steps": 1, "save_steps": 1}
    elif not any(name.startswith(("save_", "push_", "hub_")) for name in given):
        small |= {"save_strategy": "no"}
    return small


CPU = {"use_cpu": True, "bf16": False}


def make_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations are checked as a page gives them, and are short runs then."""
    for kind in (trl_stppo.PPOConfig, trl_stppo.STPPOConfig, trl_stppo.STGRPOConfig):
        monkeypatch.setattr(kind, "__init__", _short(kind.__init__))


def _short(make: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, output_dir: str | None = None, **given: Any) -> None:
        given = {"output_dir": output_dir} | given
        make(self, **given | CPU)
        make(self, **{"report_to": "none"} | given | _small(given) | CPU)

    return init


def run_block(block: Block, namespace: dict[str, Any]) -> None:
    """Execute a block, and the hidden code before it; errors point at the page's line."""
    for code, line in ((block.first, 0), (block.code, block.line - 1)):
        saved = FILE.match(code)
        if saved:
            Path(saved[1]).write_text(code)
        for long, short in SHORTER.get(block.page.name, {}).items():
            code = code.replace(long, short)
        tree = _Local().visit(ast.parse(code))
        ast.increment_lineno(tree, line)
        name = str(block.page.relative_to(ROOT))
        exec(compile(ast.fix_missing_locations(tree), name, "exec"), namespace)


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    make_short(monkeypatch)
    before = set(sys.modules)
    module = ModuleType("page")
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
