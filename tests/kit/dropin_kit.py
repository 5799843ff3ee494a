"""Runs a script written for TRL with our trainers: its import lines change, nothing else."""

import ast
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trl_stppo import PPOConfig, PPOTrainer

PPO = {"PPOTrainer": "PPOTrainer", "PPOConfig": "PPOConfig"}


def with_ours(name: str) -> dict[str, str]:
    """TRL's names of GRPO and ours, such as "STPPO", in their place."""
    return {"GRPOTrainer": f"{name}Trainer", "GRPOConfig": f"{name}Config"}


def substituted(source: str, ours: Mapping[str, str]) -> str:
    """A script that imports the names in `ours` from trl_stppo, not from TRL; there must be one."""
    lines = source.splitlines()
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    changed = 0
    for node in sorted(nodes, key=lambda node: -node.lineno):
        if (node.module or "").split(".")[0] != "trl" or node.level:
            continue
        taken = [alias for alias in node.names if alias.name in ours]
        if not taken:
            continue
        changed += len(taken)
        indent = lines[node.lineno - 1][: node.col_offset]
        names = ", ".join(f"{ours[a.name]} as {a.asname or a.name}" for a in taken)
        new = [f"{indent}from trl_stppo import {names}"]
        rest = [ast.unparse(alias) for alias in node.names if alias not in taken]
        if rest:
            new.append(f"{indent}from {node.module} import {', '.join(rest)}")
        lines[node.lineno - 1 : node.end_lineno] = new
    if not changed:
        raise ValueError(f"The script imports none of {sorted(ours)} from trl.")
    return "\n".join(lines) + "\n"


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, forced: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Gives the trainers that are built meanwhile; `forced` settings shorten what a script asks for."""
    built: list[Any] = []
    init, settle = PPOTrainer.__init__, PPOConfig.__post_init__

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        built.append(self)
        init(self, *args, **kwargs)

    def force(self: Any) -> None:
        vars(self).update(forced)
        settle(self)

    with monkeypatch.context() as patch:
        patch.setattr(PPOTrainer, "__init__", build)
        patch.setattr(PPOConfig, "__post_init__", force)
        yield built


def run(
    script: Path,
    words: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    ours: Mapping[str, str],
    **forced: Any,
) -> Any:
    """Run a script as `python script words...` would, in this process; returns its trainer.

    It runs in `folder`, where names of models and data sets are folders. `ours` is of `substituted`,
    `forced` are settings that the script's own call does not decide.
    """
    code = compile(substituted(script.read_text(), ours), str(script), "exec")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    with watched(monkeypatch, forced) as built:
        exec(code, {"__name__": "__main__", "__file__": str(script)})
    (trainer,) = built
    return trainer
