"""DeepSpeed and FSDP2 take the steps of DDP, or the constructor says why they cannot."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.kit.engine_run import CASES, ENGINES
from tests.kit.launch import ROOT, on_two_processes
from tests.kit.scripted import norm
from trl_stppo.trainer.sharding import checks

CONFIGS = sorted((ROOT / "trl_stppo" / "cli" / "accelerate_configs").glob("*.yaml"))
DEEPSPEED = [name for name in ENGINES if name.startswith("ZeRO")]
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
# Of torch 2.6, whose FSDP2 asks the CPU for a stream's events.
needs_fsdp2_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 needs a GPU with this torch"
)

# What each combination of policy and critic does: "trains" as DDP does, or "refused".
COLUMNS = (
    "full, copied", "full, named", "full, given", "LoRA, shared", "LoRA, named", "LoRA, given",
)  # fmt: skip
EXPECTED = {
    "DDP": ("trains",) * 6,
    "ZeRO-1": ("trains",) * 6,
    "ZeRO-2": ("trains",) * 6,
    "ZeRO-3": ("refused", "trains", "trains", "refused", "trains", "trains"),
    "FSDP2": ("trains",) * 6,
}
OPTIONS = [case for case in CASES if case not in COLUMNS]
REFUSED_OPTIONS = {
    ("ZeRO-3", "trained adapter, its copy as reference"),
    *((engine, "quantised, LoRA") for engine in ("ZeRO-3", "FSDP2")),
    *(("ZeRO-3", case) for case in CASES if "shared" in case),
    ("ZeRO-3", "bfloat16, LoRA"),
}
QUICK = ("LoRA, given", "LoRA, shared", "played")
# Where weights, or masters of weights, are in bfloat16 on one of the two sides.
TOLERANCE = {
    **dict.fromkeys(("bfloat16", "bfloat16, resumed"), 0.06),
    **{"bfloat16, LoRA": 0.1, "quantised, LoRA": 0.05},
}


def launch(folder: Path, engines: list[str], cases: list[str]) -> list[dict[Any, Any]]:
    """What both ranks say of each engine and case."""
    folder.mkdir(exist_ok=True)
    jobs = json.dumps(engines), json.dumps(cases)
    return on_two_processes("tests.kit.engine_run", folder, *jobs, environment=ninja())


def ninja() -> dict[str, str]:
    """Lets DeepSpeed find it beside Python."""
    bin_folder = str(Path(sys.executable).parent)
    return {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}


def check(ranks: list[dict[Any, Any]], engine: str, case: str) -> None:
    """The engine's weights are those of DDP after every step, and the same on both ranks."""
    expected, (one, two) = ranks[0]["DDP", case], (rank[engine, case] for rank in ranks)
    assert "error" not in one, one["error"]
    assert len(one["after"]) == len(expected["after"]) == CASES[case].get("max_steps", 3) + 1
    for step, weights in enumerate(expected["after"]):
        for part in ("policy/", "critic/"):
            names = [name for name in weights if name.startswith(part)]
            assert names == [name for name in one["after"][step] if name.startswith(part)]
            gap = norm([one["after"][step][n] - weights[n] for n in names])
            moved = norm([weights[n] - expected["after"][0][n] for n in names])
            rounding = 1e-12
            # DeepSpeed has cast the weights.
            if step == 0 and case in TOLERANCE:
                rounding = 2**-8 * norm([weights[n] for n in names])
            assert gap <= TOLERANCE.get(case, 1e-5) * moved + rounding, f"{part} step {step}"
    assert len(expected["norms"]) > 0
    assert one["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE.get(case, 1e-4))
    last, other = one["after"][-1], two["after"][-1]
    if CASES[case].get("resumed") and not CASES[case].get("changed"):
        assert all(torch.equal(last[name], one["first_run"][name]) for name in last)
    assert all(torch.equal(last[name], other[name]) for name in last)
    moved = norm([last[name] - one["after"][0][name] for name in last])
    assert moved > 0.05, "the case should be interesting"


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """FSDP2 in a few cases, on any machine."""
    return launch(tmp_path_factory.mktemp("quick"), ["DDP", "FSDP2"], list(QUICK))


@needs_fsdp2_on_cpu
@pytest.mark.slow
@pytest.mark.parametrize("case", QUICK)
def test_fsdp2_takes_the_steps_of_ddp(case, quick):
    check(quick, "FSDP2", case)


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """Gives the results of one engine and DDP, running them when they are first asked for."""
    results: dict[str, Any] = {}

    def results_of(engine: str) -> Any:
        if engine not in results:
            folder = tmp_path_factory.mktemp(engine)
            results[engine] = launch(folder, ["DDP", engine], list(CASES))
        return results[engine]

    return results_of


def engines(*cases: str) -> list[Any]:
    """Every engine but DDP with each case."""
    marks = {name: [needs_deepspeed] if name in DEEPSPEED else [] for name in ENGINES[1:]}
    return [pytest.param(e, c, marks=marks[e]) for e in ENGINES[1:] for c in cases]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "case"), engines(*COLUMNS))
def test_every_combination_trains_or_is_refused(engine, case, everything):
    ranks = everything(engine)
    if EXPECTED[engine][COLUMNS.index(case)] == "trains":
        check(ranks, engine, case)
    else:
        errors = [rank[engine, case]["error"] for rank in ranks]
        assert all(f"is not supported with {engine}" in error for error in errors)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "case"), engines(*OPTIONS))
def test_options_work_with_engines(engine, case, everything):
    ranks = everything(engine)
    if (engine, case) in REFUSED_OPTIONS:
        assert all("is not supported with" in rank[engine, case]["error"] for rank in ranks)
    elif case == "step refused" and engine in DEEPSPEED:
        for rank in ranks:
            assert all(rank[name, case]["refused"][-1] > 0 for name in (engine, "DDP"))
    else:
        check(ranks, engine, case)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "case"), engines("resumed", "resumed, LoRA", "resumed, LoRA, shared"))
def test_save_model_writes_the_whole_policy(engine, case, everything):
    if (engine, case) in REFUSED_OPTIONS:
        return
    for rank in everything(engine):
        saved, last = rank[engine, case]["saved"], rank[engine, case]["first_run"]
        wanted = {n: t for n, t in last.items() if n.startswith("policy/") and trained(n, case)}
        assert saved.keys() == wanted.keys()
        assert all(torch.equal(saved[name], wanted[name]) for name in wanted)


def trained(name: str, case: str) -> bool:
    return "lora_" in name or not CASES[case].get("lora")


def zero(stage: int = 2, **config: Any) -> dict[str, Any]:
    """The state of an accelerator with DeepSpeed."""
    config.setdefault("zero_optimization", {})
    return {"deepspeed_plugin": SimpleNamespace(zero_stage=stage, deepspeed_config=config)}


def fsdp(version: int = 2, **options: Any) -> dict[str, Any]:
    """The state of an accelerator with FSDP."""
    names = ("cpu_offload", "cpu_ram_efficient_loading", "activation_checkpointing")
    plain = {**dict.fromkeys(names, False), "state_dict_type": "FULL_STATE_DICT", "fsdp_version": version}
    return {"fsdp_plugin": SimpleNamespace(**{**plain, **options})}


class CPUOffloadPolicy:
    """Has the name of torch's."""


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
HSDP = SimpleNamespace(tp_size=1, cp_size=1, sp_size=1, dp_replicate_size=2)
# Engine, changes of args, and what the message names.
REFUSALS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (fsdp(1), {}, "FSDP1"),
    (zero(0), {}, "ZeRO-0"),
    (zero(optimizer={"type": "Adam"}), {}, "`optimizer`"),
    (zero(zero_optimization=OFFLOAD), {}, "`offload_optimizer`"),
    (zero(zero_optimization={"zero_quantized_gradients": True}), {}, "zero_quantized_gradients"),
    (fsdp(cpu_offload=CPUOffloadPolicy()), {}, "`fsdp_offload_params: true`"),
    (fsdp(cpu_ram_efficient_loading=True), {}, "`fsdp_cpu_ram_efficient_loading: true`"),
    (fsdp(activation_checkpointing=True), {}, "`fsdp_activation_checkpointing: true`"),
    (fsdp(state_dict_type="SHARDED_STATE_DICT"), {}, "`fsdp_state_dict_type`"),
    (fsdp(), {"rollout_staleness": 2}, "`rollout_staleness=2`"),
    (fsdp(), {"rollout_overlap": True}, "`rollout_overlap=True`"),
    (zero(), {"optim": "adafactor"}, "`optim='adafactor'`"),
    (fsdp(), {"takes_second_gradient": True}, "`stabilizers`"),
    (zero(3), {"sync_ref_model": True}, "`sync_ref_model=True`"),
    (fsdp(), {"use_transformers_continuous_batching": True}, "`use_transformers_continuous_batching=True`"),
    (zero(3), {"ds3_gather_for_generation": False}, "`ds3_gather_for_generation=False`"),
]
# The same with changes of the trainer.
REFUSED_TRAINERS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (fsdp(), {"accelerator.parallelism_config": HSDP}, "`parallelism_config`"),
    (zero(), {"optimizer": object()}, "`optim`"),
    (fsdp(), {"model.quantization_method": "bitsandbytes"}, "A quantised policy"),
    (zero(3), {"copies_adapter": True}, "adapter"),
    (zero(3), {"critic": "copied"}, "A copied critic"),
    (zero(3), {"reward_funcs": [torch.nn.Linear(1, 1)]}, "A reward model"),
]


def refusal(state: dict[str, Any], args: dict[str, Any], changes: dict[str, Any]) -> str:
    """What the checks say of a trainer of which they find nothing else to say."""
    plain = {
        "optim": "adamw_torch", "takes_second_gradient": False, "sync_ref_model": False,
        "rollout_staleness": 0, "rollout_overlap": False, "ds3_gather_for_generation": True,
        "use_transformers_continuous_batching": False, "use_vllm": False,
    }  # fmt: skip
    host = SimpleNamespace(
        args=SimpleNamespace(**{**plain, **args}),
        accelerator=SimpleNamespace(state=SimpleNamespace(**state), num_processes=2),
        model=SimpleNamespace(),
        optimizer=None,
        optimizer_cls_and_kwargs=None,
        reward_funcs=[],
    )
    others = {"critic": "named", "copies_adapter": False}
    for name, value in changes.items():
        owner, _, attribute = name.rpartition(".")
        if name in others:
            others[name] = value
        else:
            setattr(getattr(host, owner) if owner else host, attribute, value)
    with pytest.raises(ValueError) as caught:
        checks.check(host, **others)
    return str(caught.value)


@pytest.mark.parametrize(("engine", "args", "named"), REFUSALS)
def test_settings_that_an_engine_does_not_have_are_refused(engine, args, named):
    assert named in refusal(engine, args, {})


@pytest.mark.parametrize(("engine", "changes", "named"), REFUSED_TRAINERS)
def test_trainers_that_an_engine_cannot_train_are_refused(engine, changes, named):
    assert named in refusal(engine, {}, changes)
