"""What we rely on of TRL's and transformers' private side has not moved under us.

When a test here fails after an upgrade: read the upstream diff of what it names, adapt our side, then
refresh `trl_stppo/trainer/trl_contract.json` with `python tests/test_trl_contract.py --record`.
"""

import ast
import importlib
import inspect
import json
import re
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from packaging.version import Version
from transformers.masking_utils import create_causal_mask
from trl import GRPOTrainer
from trl.kernels import chunked_logprob
from trl.trainer.utils import add_fused_lm_head

ROOT = Path(__file__).resolve().parents[1]
# pytest sets the path itself.
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.kit.builders import build, logs
from tests.kit.fakes import char_tokenizer, tiny_policy
from trl_stppo.errors import UntestedTRLError
from trl_stppo.trainer import _trl, bridge, contract
from trl_stppo.trainer.contract import body_hash, canonical, upstream
from trl_stppo.trainer.ppo_trainer import STPPOTrainer

# Overridden methods that do not call upstream's.
REPLACED = {
    "_generate_and_score_completions", "_prepare_inputs", "_compute_loss", "prediction_step",
    "get_test_dataloader",
}  # fmt: skip
# Methods whose bodies we have read, because our rollout step calls or replaces them.
READ = ("_generate", "_generate_single_turn", "_calculate_rewards")
# The same of the classes that speak to vLLM.
VLLM_READ = (
    *("VLLMGeneration._init_vllm", "VLLMGeneration.generate", "VLLMGeneration.sync_weights"),
    *("VLLMClient.__init__", "VLLMClient._get", "VLLMClient._post", "VLLMClient.check_server"),
    *("VLLMClient.get_server_info", "VLLMClient.generate"),
)
BORROWED_ATTRIBUTES = (
    "_buffered_inputs", "_metrics", "_logs", "_pending_metrics", "_pending_extra_logs",
    "_signature_columns", "_step", "_tr_loss", "_total_loss_scalar", "_globalstep_last_logged",
    "_tokenizer", "_last_loaded_step",
    "_finish_current_push", "aux_loss_enabled", "beta", "chat_template",
    "chat_template_kwargs", "environments", "eos_token_ids", "generation_config",
    "generation_kwargs", "ref_model", "reward_weights", "router_aux_loss_coef",
)  # fmt: skip
FIXTURE = contract.FILE
SOURCES = sorted((ROOT / "trl_stppo" / "trainer").rglob("*.py"))
TODO = (
    "Read the upstream diff, adapt trl_stppo/trainer, then run `python tests/test_trl_contract.py --record`."
)


def package(name: str) -> str:
    return upstream(name).__module__.split(".")[0]


def signature(function: Any) -> str:
    """Parameters and defaults; annotations may change freely."""
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters)


def our_methods() -> set[str]:
    """Methods of our trainer classes that GRPOTrainer has too."""
    ours = STPPOTrainer.__mro__[: STPPOTrainer.__mro__.index(GRPOTrainer)]
    names = {n for cls in ours for n, v in vars(cls).items() if inspect.isroutine(v)}
    return {name for name in names if hasattr(GRPOTrainer, name)}


def attributes_used() -> set[str]:
    """Every `self.x` and `trainer.x` in our trainer modules."""
    found: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owners = ("self", "trainer", "host", "self.trainer")
                found |= {node.attr} if ast.unparse(node.value) in owners else set()
    return found


def called_methods() -> list[str]:
    """Upstream's methods that we call without overriding them."""
    used = {n for n in attributes_used() if inspect.isroutine(getattr(GRPOTrainer, n, None))}
    used -= {n for n in used if hasattr(object, n)}
    from_trl = {n for n in used - our_methods() if package(n) == "trl"}
    return sorted(from_trl)


def borrowed_methods() -> list[str]:
    """Upstream's methods among what we borrow."""
    return [n for n in BORROWED_ATTRIBUTES if inspect.isroutine(getattr(GRPOTrainer, n, None))]


def imported_helpers() -> dict[str, Any]:
    """Everything `_trl.py` imports from TRL's modules (the public classes apart)."""
    tree = ast.parse(Path(_trl.__file__).read_text())
    imports = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module.startswith("trl.")]
    found = {a.name: getattr(importlib.import_module(n.module), a.name) for n in imports for a in n.names}
    return {name: value for name, value in found.items() if not inspect.ismodule(value)}


@cache
def written_by_upstream() -> set[str]:
    """Every `self.x = ...` in GRPOTrainer and its bases."""
    found = set()
    for cls in GRPOTrainer.__mro__[:-1]:
        if not cls.__module__.startswith(("trl", "transformers")):
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls)))):
            is_store = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if is_store and ast.unparse(node.value) == "self":
                found.add(node.attr)
    return found


def snapshot() -> dict[str, Any]:
    names = sorted({*our_methods(), *READ, *VLLM_READ, *borrowed_methods()})
    return {
        "bodies": {
            module.__name__: {
                module.__version__: {n: body_hash(n) for n in names if package(n) == module.__name__}
            }
            for module in (trl, transformers)
        },
        "signatures": {
            **{n: signature(upstream(n)) for n in [*names, *called_methods()]},
            **{n: signature(f) for n, f in imported_helpers().items()},
        },
    }


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads(FIXTURE.read_text())


@pytest.mark.parametrize("name", sorted(our_methods() - REPLACED))
def test_wrapped_methods_call_super(name):
    ours = STPPOTrainer.__mro__[: STPPOTrainer.__mro__.index(GRPOTrainer)]
    bodies = [inspect.getsource(cls) for cls in ours if name in vars(cls)]
    # Called there, or handed to a helper that calls it.
    assert any(re.search(rf"super\(\)\.{name}\b", body) for body in bodies)


@pytest.mark.parametrize("name", sorted({*our_methods(), *READ, *VLLM_READ, *borrowed_methods()}))
def test_bodies_of_methods_that_we_override_or_borrow_are_those_we_read(name, recorded):
    module = sys.modules[package(name)]
    versions = recorded["bodies"][module.__name__]
    if module.__version__ not in versions and module.__name__ == "transformers":
        pytest.skip(f"transformers {module.__version__} not recorded; its signature is checked")
    # An unknown TRL is compared with the newest one known.
    known = versions.get(module.__version__, list(versions.values())[-1])
    assert body_hash(name) == known.get(name), (
        f"{module.__name__} {module.__version__} changed the body of "
        f"{upstream(name).__qualname__}, on which we rely. {TODO}"
    )


@pytest.mark.parametrize("name", sorted({*our_methods(), *VLLM_READ, *called_methods(), *borrowed_methods()}))
def test_signatures_of_methods_that_we_wrap_or_call(name, recorded):
    known = recorded["bodies"].get(package(name), {})
    versions = [Version(version) for version in known]
    if package(name) == "transformers" and Version(transformers.__version__) < min(versions):
        pytest.skip(f"transformers {transformers.__version__} is older than what we read")
    assert signature(upstream(name)) == recorded["signatures"].get(name), (
        f"The signature of {upstream(name).__qualname__} has changed. {TODO}"
    )


@pytest.mark.parametrize("name", sorted(imported_helpers()))
def test_signatures_of_imported_helpers(name, recorded):
    assert signature(imported_helpers()[name]) == recorded["signatures"].get(name), (
        f"The signature of TRL's {name} has changed. {TODO}"
    )


@pytest.mark.parametrize("name", BORROWED_ATTRIBUTES)
def test_borrowed_attributes_are_still_set_upstream(name):
    # A borrowed method has no assignment; its body is held with those we override.
    assert name in written_by_upstream() or name in borrowed_methods(), (
        f"GRPOTrainer sets no `self.{name}` any more, which our trainers read. {TODO}"
    )


def test_every_name_under_which_we_borrow_is_listed():
    nodes = [*ast.walk(ast.parse(Path(bridge.__file__).read_text()))]
    borrowed = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    borrowed |= {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    borrowed = {name for name in borrowed if name.startswith("_")}
    assert len(borrowed) > 15
    ours = {"_name", "_paper", "_tag_names", *READ}
    assert borrowed - ours <= {*BORROWED_ATTRIBUTES, *our_methods()}


def entries(names: tuple[str, ...], log: str) -> set[str]:
    """Keys under which methods of upstream's write into one of its logs; `{}` in place of a name."""
    found = set()
    for name in names:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(upstream(name))))):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == f"self.{log}":
                key = node.slice
                parts = key.values if isinstance(key, ast.JoinedStr) else [key]
                texts = [p.value if isinstance(p, ast.Constant) else "{}" for p in parts]
                found.add("".join(texts))
    return found


ROLLOUT = ("_generate", "_generate_and_score_completions")


def test_our_rollout_logs_what_upstreams_does(tmp_path):
    """Under the same names, once per rollout batch."""
    metrics, tables = entries(ROLLOUT, "_metrics[mode]"), entries(ROLLOUT, "_logs")
    assert {"reward_std", "completions/clipped_ratio", "rewards/{}/mean"} <= metrics
    trainer = build(tmp_path, arguments={"eval_dataset": None})
    trainer.train()
    ours = set(logs(trainer))
    tools = {"tools/call_frequency", "tools/failure_frequency"}
    samplers = {m for m in metrics if m.startswith("sampling/")}
    groups = {"frac_reward_zero_std"}
    users = {"{}"}
    known = metrics - tools - samplers - groups - users
    expected = {metric.replace("{}", "share_of_a") for metric in known}
    assert expected <= ours
    assert tables - {"images"} == {"prompt", "completion", "rewards", "advantages", "extra"}


def test_the_fused_head_reads_the_size_of_its_tiles_whenever_it_runs():
    """`small_tiles` sets it around forward and backward passes."""
    function = chunked_logprob.ChunkedLogProbFunction
    for method in (function.forward, function.backward):
        assert "TOKEN_CHUNK_SIZE" in inspect.getsource(method), TODO
    assert list(inspect.signature(chunked_logprob._use_triton).parameters) == ["device"], TODO


def test_every_private_attribute_we_read_is_listed_as_borrowed():
    private = {n for n in attributes_used() & written_by_upstream() if n.startswith("_")}
    assert private <= set(BORROWED_ATTRIBUTES)


def test_a_changed_body_is_noticed_and_a_changed_docstring_is_not():
    def canonical_source(text: str) -> str:
        return repr(canonical(ast.parse(text)))

    plain = canonical_source("def f(x):\n    'One.'\n    return x")
    assert plain == canonical_source("def f(x):\n    'Two.'\n    return x  # why")
    assert plain != canonical_source("def f(x):\n    return -x")


@pytest.fixture
def other_trl(monkeypatch):
    """A TRL of another minor version."""
    monkeypatch.setattr(trl, "__version__", "1.99.0")
    contract.check_trl.cache_clear()
    yield
    contract.check_trl.cache_clear()


def test_an_untested_trl_without_changes_is_told_once(other_trl, tmp_path, caplog):
    for folder in ("one", "two"):
        build(tmp_path / folder, STPPOTrainer)
    assert [r.levelname for r in caplog.records if "1.99.0" in r.getMessage()] == ["WARNING"]


@pytest.mark.parametrize("name", ["_compute_loss", "_calculate_rewards"])
def test_an_untested_trl_with_a_changed_method_is_refused(name, other_trl, tmp_path, monkeypatch):
    monkeypatch.setattr(contract.GRPOTrainer, name, lambda self: None)
    with pytest.raises(UntestedTRLError, match=name):
        build(tmp_path, STPPOTrainer)


def test_a_method_that_has_gone_is_named(other_trl, monkeypatch):
    monkeypatch.delattr(contract.VLLMClient, "check_server")
    with pytest.raises(UntestedTRLError, match=r"VLLMClient\.check_server"):
        contract.check_trl()


def test_another_patch_of_a_tested_minor_version_is_not_compared(monkeypatch):
    contract.check_trl.cache_clear()
    monkeypatch.setattr(trl, "__version__", "1.16.9")
    monkeypatch.setattr(contract, "body_hash", None)
    contract.check_trl()
    contract.check_trl.cache_clear()


def record() -> None:
    """Write the fixture, keeping what was recorded for other versions."""
    new = snapshot()
    if FIXTURE.exists():
        old = json.loads(FIXTURE.read_text())["bodies"]
        for module, versions in new["bodies"].items():
            kept = {v: h for v, h in old.get(module, {}).items() if v not in versions}
            new["bodies"][module] = {**kept, **versions}
    FIXTURE.write_text(json.dumps(new, indent=1) + "\n")
    print(f"recorded trl {trl.__version__}, transformers {transformers.__version__}: {FIXTURE.name}")


if __name__ == "__main__":
    if sys.argv[1:] != ["--record"]:
        sys.exit("usage: python tests/test_trl_contract.py --record")
    record()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mask_of_four_dimensions_reaches_attention_as_it_is(attention):
    model = tiny_policy(char_tokenizer())
    model.set_attn_implementation(attention)
    mask = torch.eye(3, dtype=torch.bool)[None, None]
    made = create_causal_mask(model.config, torch.zeros(1, 3, 16), mask, None)
    assert made is mask


def test_the_fused_head_scores_labels_that_are_shifted_already():
    model = tiny_policy(char_tokenizer())
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    ids, labels = torch.tensor([[5, 6, 7]]), torch.tensor([[6, -100, 9]])
    found = model(input_ids=ids, shift_labels=labels, fused_lm_head=True)
    logprobs = model(input_ids=ids).logits.log_softmax(-1)[0]
    torch.testing.assert_close(found.log_probs[0, [0, 2]], logprobs[[0, 2], [6, 9]])
    assert found.log_probs[0, 1] == 0
