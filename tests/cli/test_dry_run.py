"""`trl-stppo train --dry_run`: every variant passes, and the plan is right."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests.dry_run_kit import launcher_of
from tests.script_kit import AGENT, DEMO, ROOT
from tests.tiers import quick
from trl_stppo.cli import agent_models, agents, arguments, early, planned, train
from trl_stppo.models.memory import estimate
from trl_stppo.trainer.stgrpo_config import GROUP_VARIANTS
from trl_stppo.trainer.stppo_config import VARIANTS

PAPER = ROOT / "scripts" / "configs" / "paper"
# Every variant with a critic and without one; all files there are in docs/test_shipped_files.py.
CASES = [(DEMO, variant) for variant in VARIANTS]
CASES += [(str(PAPER / "search_1.5b_1gpu_grpo.yaml"), variant) for variant in GROUP_VARIANTS]
LIGHT = [*CASES[: len(VARIANTS)], CASES[-1]]


@pytest.mark.parametrize(("path", "variant"), quick(CASES, *LIGHT), ids=lambda v: Path(v).stem)
def test_every_variant_passes(path, variant, dry_run):
    code, shown = dry_run("--config", path, *launcher_of(Path(path)), "--variant", variant)
    assert (code, "PROBLEM" in shown) == (0, False), shown
    assert f"variant {variant}:" in shown


def test_the_arithmetic_of_the_papers_batches(dry_run):
    path = ROOT / "scripts" / "configs" / "paper" / "search_1.5b_8gpu_ppo.yaml"
    _, shown = dry_run("--config", str(path), *launcher_of(path))
    for line in (
        "processes 8, ZeRO-2",
        "episodes 512 (one per prompt)",
        "micro-batches 16 of 4 episodes on each process",
        "mini-batches 2 of 256 episodes",
        "optimizer steps 2",
        "4 turns, 3584 tokens, 2000 of them sampled",
        "rollouts 1,005",
        "optimizer steps 2,010",
        "learning rates policy 1e-06, critic 1e-05",
        "Qwen/Qwen2.5-1.5B-Instruct from the Hub, about 2.9 GiB",
        "data could not be loaded",
    ):
        assert line in shown, line


def test_the_number_of_processes_is_a_flag_and_changes_the_batch(dry_run):
    one = dry_run("--config", DEMO)[1]
    four = dry_run("--config", DEMO, "--dry_run_processes", "4", "--total_episodes", "4096")[1]
    assert "episodes 128 (one" in one
    assert "processes 4, DDP" in four
    assert "episodes 512 (one" in four
    assert "rollouts 8 " in four


def test_the_number_of_processes_is_taken_from_the_environment(dry_run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    code, shown = dry_run("--config", DEMO)
    assert "processes 2, ZeRO-1" in shown
    assert os.environ["WORLD_SIZE"] == "2"
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
    if importlib.util.find_spec("deepspeed") is None:  # which was to be launched here
        assert "needs the package deepspeed" in shown
    else:
        assert code == 0, shown


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "`fsdp_state_dict_type` "),
        ({"ACCELERATE_USE_DEEPSPEED": "true",
          "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, "`offload_optimizer` to 'cpu'"),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "nowhere.json"},
         "Received: nowhere.json"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "Mixed precision 'fp16'"),
    ],
)  # fmt: skip
def test_options_are_taken_from_the_environment_too(told, said, dry_run, monkeypatch):
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    code, shown = dry_run("--config", DEMO)
    assert code == 1
    assert said in shown


def test_the_planned_memory_is_what_the_table_of_the_docs_says(dry_run):
    path = ROOT / "scripts" / "configs" / "single_gpu_24gb.yaml"
    assert "about 13.1 GiB at the peak (rollout)" in dry_run("--config", str(path))[1]


def test_the_planned_memory_is_what_a_built_trainer_expects(dry_run, tmp_path):
    """Both for the shipped model, whose shape is read from its folder; prompts included."""
    shown = dry_run("--config", DEMO)[1]
    words = ["--config", DEMO, "--output_dir", str(tmp_path), "--report_to", "none"]
    parsed = agents.parse_flags(arguments.TrainArguments, words)
    run = planned.Plan(*parsed, prompt=23, on_cpu=True)
    setup = planned.planned_setup(run)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(AGENT))
    assert setup.trainable == model.num_parameters()
    assert setup.critic_trainable == model.num_parameters() + 128, "tied embeddings, and a head"
    assert setup.rows == 8
    assert f"about {estimate(setup).peak / 2**30:.1f} GiB at the peak (rollout)" in shown
    assert "smallest card" not in shown, "use_cpu"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--use_vllm", "true"], "not known: vLLM on the same card reserves a share of it"),
        (["--model_name_or_path", "someone/else"], "not known: the shape of someone/else"),
        (["--lora_modules_to_save", "embed_tokens"], "each process about 1"),
        (["--lora_target_modules", "q_proj", "v_proj"], "each process about 1"),
        # One word is a pattern to PEFT, for the whole name of a layer.
        (["--lora_target_modules", "q_proj"], "PROBLEM: Target modules q_proj not found"),
    ],
)
def test_memory_is_known_or_why_it_is_not(flags, said, dry_run):
    path = ROOT / "scripts" / "configs" / "single_gpu_24gb.yaml"
    assert said in dry_run("--config", str(path), *flags)[1]


def test_the_options_of_loading_are_merged(dry_run):
    """A flag that was set wins over `model_init_kwargs`, and its default does not."""
    options, model_config = agent_models.model_options, agents.ModelConfig
    given = {"dtype": "bfloat16", "low_cpu_mem_usage": True}
    assert options(model_config(), given) == {**given, "revision": "main"}
    assert options(model_config(dtype="float16"), given)["dtype"] == "float16"
    assert options(model_config())["dtype"] == "float32"
    kwargs = ("--model_init_kwargs", '{"dtype": "bfloat16"}')
    assert "fully trained, bfloat16" in dry_run("--config", DEMO, *kwargs)[1]


# ---------------------------------------------------------------------- whether it is one


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--dry_run", True), ("--dry-run", True), ("--dry_run=true", True), ("--dry_run T", True),
        ("--dry_run y", True), ("--dry_run 1", True), ("--dry_run=Yes", True), ("", False),
        ("--dry_run false", False), ("--dry_run=no", False), ("--dry_run 0", False),
        ("--config on", True), ("--config t", True), ("--config off", False),
        ("--config on --dry_run false", False), ("--config off --dry_run", True),
    ],
)  # fmt: skip
def test_a_dry_run_is_asked_for_as_the_parser_reads_it(words, wanted, tmp_path, monkeypatch):
    for name, value in (("on", "true"), ("t", "t"), ("off", "false")):
        (tmp_path / name).write_text(f"dry_run: {value}\n")
    monkeypatch.chdir(tmp_path)
    given = words.split()
    assert early.wants_dry_run(given) is wanted
    flags = [*given, "--use_cpu", "true", "--bf16", "false"]
    assert agents.parse_flags(arguments.TrainArguments, flags)[0].dry_run is wanted
    monkeypatch.delenv("HF_HUB_OFFLINE")
    early.quieten(given)
    assert os.environ.pop("HF_HUB_OFFLINE", None) == ("1" if wanted else None)


def test_whoever_asks_to_look_only_is_not_trained_for(monkeypatch):
    monkeypatch.setattr(train, "make_trainer", None)
    parsed = agents.parse_flags(
        arguments.TrainArguments, ["--config", DEMO, "--use_cpu", "true", "--dry_run", "t"]
    )
    with pytest.raises(ValueError, match="nothing is trained"):
        train.train(*parsed)


# Ends the process when the first library is imported that would look for the network.
WATCH = """
import os, runpy, sys
class Watch:
    def find_spec(self, name, *rest):
        if name in ("huggingface_hub", "transformers", "datasets", "trl"):
            os._exit(0 if os.environ.get("HF_HUB_OFFLINE") == "1" else 3)
sys.meta_path.insert(0, Watch())
sys.path.insert(0, os.path.dirname(sys.argv[1]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(("flag", "status"), [("y", 0), ("false", 3)])
def test_a_dry_run_is_offline_before_the_libraries_are_imported(flag, status):
    result = subprocess.run(
        [sys.executable, "-c", WATCH, "scripts/train_stppo.py", "--dry_run", flag],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"},
        check=False,
        timeout=900,
    )
    assert result.returncode == status
