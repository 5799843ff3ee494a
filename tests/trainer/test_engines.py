"""DeepSpeed and FSDP2 take the steps of DDP, or the constructor says why they cannot."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

from tests.engine_run import CASES, ENGINES
from tests.scripted import norm
from tests.trainer.test_two_processes import free_port
from trl_stppo.trainer import engine_checks

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "scripts" / "accelerate_configs").glob("*.yaml"))
DOCS = (ROOT / "docs" / "distributed.md").read_text()
DEEPSPEED = [name for name in ENGINES if name.startswith("ZeRO")]
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)

# What each combination of policy and critic does: "trains" as DDP does, or "refused".
COLUMNS = (
    "full, copied",
    "full, named",
    "full, given",
    "LoRA, shared",
    "LoRA, named",
    "LoRA, given",
)
EXPECTED = {
    "DDP": ("trains",) * 6,
    "ZeRO-1": ("trains",) * 6,
    "ZeRO-2": ("trains",) * 6,
    "ZeRO-3": ("refused", "trains", "trains", "refused", "trains", "trains"),
    "FSDP2": ("trains", "trains", "trains", "refused", "trains", "trains"),
}
OPTIONS = [case for case in CASES if case not in COLUMNS]
QUICK = ("full, copied", "LoRA, given", "played")
# bfloat16 weights that are compared with float32 ones, after a few steps.
TOLERANCE = {"bfloat16": 0.05, "bfloat16, LoRA": 0.1}


def launch(folder: Path, engines: list[str], cases: list[str]) -> list[dict[Any, Any]]:
    """What both ranks say of each engine and case."""
    folder.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    job = [str(folder), json.dumps(engines), json.dumps(cases)]
    bin_folder = str(Path(sys.executable).parent)  # DeepSpeed looks for ninja there
    result = subprocess.run(
        [sys.executable, *launcher, "-m", "tests.engine_run", *job],
        cwd=ROOT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-8000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)]


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
            assert gap <= TOLERANCE.get(case, 1e-5) * moved + 1e-12, f"{part} step {step}"
    last, other = one["after"][-1], two["after"][-1]
    assert all(torch.equal(last[name], other[name]) for name in last)
    moved = norm([last[name] - one["after"][0][name] for name in last])
    assert moved > 0.05, "the case should be interesting"


# ------------------------------------------------------------------ without DeepSpeed


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """FSDP2 in a few cases, as fast as the suite wants it."""
    cases = [*QUICK, "LoRA, shared"]
    return launch(tmp_path_factory.mktemp("quick"), ["DDP", "FSDP2"], cases)


@pytest.mark.parametrize("case", QUICK)
def test_fsdp2_takes_the_steps_of_ddp(case, quick):
    check(quick, "FSDP2", case)


def test_fsdp2_refuses_a_shared_critic(quick):
    error = quick[1]["FSDP2", "LoRA, shared"]["error"]
    assert "shared critic of a LoRA policy is not supported with FSDP2" in error
    assert "value_model_name_or_path or value_model" in error


# ------------------------------------------------------------------------ everything


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
    shared = CASES[case].get("lora") and "critic" not in CASES[case]
    if shared and EXPECTED[engine][COLUMNS.index("LoRA, shared")] == "refused":
        pytest.skip("refused")
    check(everything(engine), engine, case)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "case"), engines("resumed", "resumed, LoRA"))
def test_save_model_writes_the_whole_policy(engine, case, everything):
    for rank in everything(engine):
        saved, last = rank[engine, case]["saved"], rank[engine, case]["first_run"]
        wanted = {n: t for n, t in last.items() if n.startswith("policy/") and trained(n, case)}
        assert saved.keys() == wanted.keys()
        assert all(torch.equal(saved[name], wanted[name]) for name in wanted)


def trained(name: str, case: str) -> bool:
    return "lora_" in name or not CASES[case].get("lora")


# --------------------------------------------------------------------- the table, the files


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_the_checks_have_the_expected_table(engine):
    allowed = engine_checks.CRITICS[engine]
    for column, result in zip(COLUMNS, EXPECTED[engine], strict=True):
        policy, kind = column.split(", ")
        assert (kind in allowed[policy]) == (result == "trains")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_documentation_has_the_expected_table(engine):
    row = next(line for line in DOCS.splitlines() if line.startswith(f"| {engine} |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")][1:]
    assert tuple(cells) == tuple(
        {"trains": "yes", "refused": "refused"}[e] for e in EXPECTED[engine]
    )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_the_configurations(path):
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)
    assert config.mixed_precision == "bf16"
    written = yaml.safe_load(path.read_text())
    assert config.num_processes == written["num_processes"]
    assert path.name in DOCS


def test_there_is_a_configuration_for_every_engine():
    stems = {path.stem for path in CONFIGS}
    assert stems == {"single_gpu", "multi_gpu", "zero1", "zero2", "zero3", "fsdp2", "multi_node"}
    fsdp = yaml.safe_load((CONFIGS[0].parent / "fsdp2.yaml").read_text())["fsdp_config"]
    assert (fsdp["fsdp_version"], fsdp["fsdp_cpu_ram_efficient_loading"]) == (2, False)
    for stage in (1, 2, 3):
        zero = yaml.safe_load((CONFIGS[0].parent / f"zero{stage}.yaml").read_text())
        assert zero["deepspeed_config"]["zero_stage"] == stage
