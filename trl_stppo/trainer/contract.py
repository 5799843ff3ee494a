"""Check of an untested TRL: have the methods changed on which the trainers rely?

`trl_contract.json` has hashes of the bodies of these methods, by version of TRL.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import logging
import textwrap
from functools import cache
from pathlib import Path
from types import FunctionType

import trl
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from ..errors import UntestedTRLError

logger = logging.getLogger(__name__)
FILE = Path(__file__).with_name("trl_contract.json")


def upstream(name: str) -> FunctionType:
    """Return the plain function behind a method of GRPOTrainer, or of the vLLM class in `name`."""
    owner, _, method = name.rpartition(".")
    vllm = {"VLLMGeneration": VLLMGeneration, "VLLMClient": VLLMClient}
    function: FunctionType = inspect.unwrap(getattr(vllm.get(owner, GRPOTrainer), method))
    return function


def body_hash(name: str) -> str:
    """Return the hash of a method's syntax tree without docstrings, equal under every Python version."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(upstream(name))))
    return hashlib.sha256(repr(canonical(tree)).encode()).hexdigest()


def canonical(node: object) -> object:
    """Return a syntax tree as plain tuples, without docstrings and empty fields."""
    if isinstance(node, list):
        return [canonical(item) for item in node if not _is_docstring(item)]
    if not isinstance(node, ast.AST):
        return node
    fields = [(key, canonical(value)) for key, value in ast.iter_fields(node)]
    # Python 3.12 and 3.13 added fields that are empty in older code.
    return type(node).__name__, [(k, v) for k, v in fields if v not in (None, [])]


def _is_docstring(node: object) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


@cache
def check_trl() -> None:
    """Compare an untested minor version of TRL with the newest tested version.

    Raises:
        UntestedTRLError: TRL has changed methods on which the trainers rely.
    """
    tested = json.loads(FILE.read_text(encoding="utf-8"))["bodies"]["trl"]
    minor = trl.__version__.split(".")[:2]
    if any(version.split(".")[:2] == minor for version in tested):
        return
    newest, known = [*tested.items()][-1]
    changed = [name for name, found in known.items() if _hash_or_none(name) != found]
    if changed:
        raise UntestedTRLError(
            f"TRL {trl.__version__} differs from the tested {newest} in {', '.join(changed)}, on which the "
            f"trainers rely. Install a newer trl-stppo, or `pip install 'trl=={newest}'`."
        )
    logger.warning(
        "TRL %s is not tested with this package. The %d methods on which it relies are those of TRL %s.",
        trl.__version__, len(known), newest,
    )  # fmt: skip


def _hash_or_none(name: str) -> str | None:
    try:
        return body_hash(name)
    except (AttributeError, OSError, TypeError):
        # The method has gone, or its source cannot be read.
        return None
