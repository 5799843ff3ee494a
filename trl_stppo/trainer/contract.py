"""The private methods and state of TRL on which the trainers rely, and a check of an untested TRL.

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

# Method name -> "wrapped" (calls super() and post-processes) or "replaced" (ours alone).
OVERRIDDEN = {
    "__init__": "wrapped",
    "_get_per_token_logps_and_entropies": "wrapped",
    "_generate_and_score_completions": "replaced",
    "_prepare_inputs": "replaced",
    "_compute_loss": "replaced",
    "training_step": "wrapped",
    "create_optimizer": "wrapped",
    "create_accelerator_and_postprocess": "wrapped",
    "_prepare_for_training": "wrapped",
    "_save": "wrapped",
    "_load_from_checkpoint": "wrapped",
    "_load_best_model": "wrapped",
    "evaluate": "wrapped",
    "evaluation_loop": "wrapped",
    "prediction_step": "replaced",
    "get_eval_dataloader": "wrapped",
    "get_test_dataloader": "replaced",
    "_save_checkpoint": "wrapped",
    "_get_output_dir": "wrapped",
    "_get_train_sampler": "wrapped",
    "_init_training_state": "wrapped",
    "_run_epoch": "wrapped",
    "_maybe_log_save_evaluate": "wrapped",
    "_finalize_training": "wrapped",
    "_push_from_checkpoint": "wrapped",
    "push_to_hub": "wrapped",
    "create_model_card": "wrapped",
    "save_model": "wrapped",
    "train": "wrapped",
    "log": "wrapped",
}

# Methods whose bodies we have read, because our rollout step calls or replaces them.
READ = ("_generate", "_generate_single_turn", "_calculate_rewards")
# The same of the classes that speak to vLLM.
VLLM_READ = (
    *("VLLMGeneration._init_vllm", "VLLMGeneration.generate", "VLLMGeneration.sync_weights"),
    *("VLLMClient.__init__", "VLLMClient._get", "VLLMClient._post", "VLLMClient.check_server"),
    *("VLLMClient.get_server_info", "VLLMClient.generate"),
)

BORROWED_ATTRIBUTES = (
    "_buffered_inputs",
    "_metrics",
    "_logs",
    "_pending_metrics",
    "_pending_extra_logs",
    "_signature_columns",
    "_step",
    "_total_loss_scalar",
    "_tokenizer",
    "_last_loaded_step",
    "_finish_current_push",
    "aux_loss_enabled",
    "beta",
    "chat_template",
    "chat_template_kwargs",
    "environments",
    "eos_token_ids",
    "generation_config",
    "generation_kwargs",
    "ref_model",
    "reward_weights",
    "router_aux_loss_coef",
)


def upstream(name: str) -> FunctionType:
    """Return the plain function behind a method of GRPOTrainer, or of a class of vLLM's that is named."""
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
    """Compare a TRL whose minor version is not tested with the newest one that is.

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
