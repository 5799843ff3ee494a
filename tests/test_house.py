"""What a reader may rely on: few classes above upstream's, and nobody reaches into another's private side."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from trl import GRPOTrainer

from tests.kit.builders import build
from tests.test_trl_contract import written_by_upstream
from trl_stppo import STPPOTrainer

PACKAGE = Path(__file__).resolve().parents[1] / "trl_stppo"
MODULES = sorted(PACKAGE.rglob("*.py"))
DOORS = [PACKAGE / "trainer" / name for name in ("_trl.py", "_trl_vllm.py", "bridge.py")]
ALLOWED = 20


def private_accesses(tree: ast.AST) -> Iterator[str]:
    """Every `name._attr` where name is not self or cls, by getattr and its like too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr"):
            owner, name = node.args[0], getattr(node.args[1], "value", "")
        else:
            continue
        own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
        supers = isinstance(owner, ast.Call) and getattr(owner.func, "id", "") == "super"
        if str(name).startswith("_") and not str(name).startswith("__") and not (own or supers):
            yield ast.unparse(node)


@pytest.mark.long
def test_private_attributes_are_private():
    found = Counter(
        f"{path.relative_to(PACKAGE)}: {access}"
        for path in MODULES
        if path not in DOORS
        for access in private_accesses(ast.parse(path.read_text()))
    )
    assert found.total() <= ALLOWED, found
    assert not [line for line in found if "trainer._" in line or "host._" in line]


def test_these_are_the_public_names_that_a_trainer_adds_to_upstreams(tmp_path):
    trainer = build(tmp_path, STPPOTrainer)
    ours = [cls for cls in type(trainer).__mro__ if cls.__module__.startswith("trl_stppo")]
    names = {name for cls in ours for name in vars(cls)} | {*vars(trainer)}
    names -= {*dir(GRPOTrainer)} | written_by_upstream()
    assert {name for name in names if not name.startswith("_")} == {
        *(
            "config_class", "critic", "generate_completions", "has_critic", "loop_class",
        ),
        # What the parts of a run read of upstream's private state.
        *(
            "call_reward_funcs", "checkpoint_folder", "decode", "end_ids", "finish_push",
            "generate_turns", "load_vllm", "loss_sums", "micro_step", "next_log",
            "next_metrics", "next_table", "pending_columns", "pending_metrics",
            "policy_logprobs", "push_checkpoint", "rollout_buffer", "save_checkpoint",
            "signature_columns", "text_tokenizer",
        ),
        *("stop_reason", "stop_signal", "uses_shared_critic"),
    }  # fmt: skip
