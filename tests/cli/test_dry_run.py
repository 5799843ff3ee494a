"""`trl-stppo train --dry_run`: every variant passes, the plan is right, and what would not start says why."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.dry_run_kit import processes_of
from tests.kit.script_kit import AGENT, DEMO, ROOT, small_data
from tests.kit.tiers import quick
from trl_stppo.cli import agents
from trl_stppo.trainer.stgrpo_config import GROUP_VARIANTS
from trl_stppo.trainer.stppo_config import VARIANTS

PAPER = ROOT / "scripts" / "configs" / "paper"
# Every variant with a critic and without one; all files there are in docs/test_shipped_files.py.
CASES = [(DEMO, variant) for variant in VARIANTS]
CASES += [(str(PAPER / "search_1.5b_1gpu_grpo.yaml"), variant) for variant in GROUP_VARIANTS]
LIGHT = [*CASES[: len(VARIANTS)], CASES[-1]]


@pytest.mark.parametrize(("path", "variant"), quick(CASES, *LIGHT), ids=lambda v: Path(v).stem)
def test_every_variant_passes(path, variant, dry_run):
    code, shown = dry_run("--config", path, "--variant", variant)
    assert (code, "PROBLEM" in shown) == (0, False), shown
    assert f"variant {variant}:" in shown


def test_the_arithmetic_of_the_papers_batches(dry_run, monkeypatch):
    path = PAPER / "search_1.5b_8gpu_ppo.yaml"
    monkeypatch.setenv("WORLD_SIZE", processes_of(path))
    _, shown = dry_run("--config", str(path))
    for line in (
        "processes 8 ",
        "512 episodes (one per prompt), 16 micro-batches of 4 on each process",
        "2 per rollout batch (2 mini-batches of 256, 1 epochs)",
        "4 turns, 3584 tokens",
        "2010 optimizer steps, 1005 rollout batches",
        "learning rate 1e-06",
        "separate, learning rate 1e-05",
    ):
        assert line in shown, line


def test_the_number_of_processes_changes_the_batch(dry_run, monkeypatch):
    one = dry_run("--config", DEMO)[1]
    monkeypatch.setenv("WORLD_SIZE", "4")
    four = dry_run("--config", DEMO, "--total_episodes", "4096")[1]
    assert "128 episodes (one" in one
    assert "processes 4 " in four
    assert "512 episodes (one" in four
    assert "8 rollout batches" in four
    assert os.environ["WORLD_SIZE"] == "4"


def test_the_options_of_loading_are_merged(dry_run):
    """A flag that was set wins over `model_init_kwargs`, and its default does not."""
    options, model_config = agents.model_options, agents.ModelConfig
    given = {"dtype": "bfloat16", "low_cpu_mem_usage": True}
    assert options(model_config(), given) == {**given, "revision": "main"}
    assert options(model_config(dtype="float16"), given)["dtype"] == "float16"
    assert options(model_config())["dtype"] == "float32"
    kwargs = ("--model_init_kwargs", '{"dtype": "bfloat16"}')
    assert "fully trained, bfloat16" in dry_run("--config", DEMO, *kwargs)[1]


@pytest.mark.parametrize(("flags", "named", "code"), [
    (["--variant", "so-ppo"], "`variant='so-ppo'`", 2),
    (["--num_processes", "4"], "accelerate launch --num_processes 4", 2),
    (["--environment", "SearchEnv"], "`SearchEnv`", 1),
    (["--environment", "none", "--max_turns", "3"], "`max_turns=3`", 1),
    (["--load_in_4bit", "true"], "`use_peft: true`", 1),
    (["--model_name_or_path", "./nowhere"], "`model_name_or_path=./nowhere`", 1),
    (["--value_model_name_or_path", "./nowhere"], "`value_model_name_or_path=./nowhere`", 1),
    (["--dataset_name", "nowhere.jsonl"], "`dataset_name=nowhere.jsonl`", 1),
    (["--reward_funcs", "trl_stppo.recipes.search.rewards:nothing"], "'nothing'", 1),
    (["--reward_weights", "1", "2"], "`reward_weights`", 1),
    (["--eval_strategy", "steps", "--eval_steps", "9", "--dataset_test_split", "dev",
      "--eval_episodes", "0", "--dataset_name", "DATA"], "`eval_strategy=steps`", 1),
    (["--eval_environment_kwargs", "top_k=3"], "`eval_environment_kwargs=top_k=3`", 1),
])  # fmt: skip
def test_what_a_training_refuses_is_refused_here(flags, named, code, dry_run, tmp_path):
    flags = [small_data(tmp_path / "data") if word == "DATA" else word for word in flags]
    words = ("--config", DEMO, "--output_dir", str(tmp_path / "run"))
    found, shown = dry_run(*words, *flags)
    assert found == code
    assert named in shown


def test_a_critic_of_a_method_without_one_is_refused(dry_run):
    path = str(PAPER / "search_1.5b_1gpu_grpo.yaml")
    code, shown = dry_run("--config", path, "--value_model_name_or_path", AGENT)
    assert (code, "`value_model_name_or_path=" in shown) == (1, True)


def test_all_problems_are_shown_at_once(dry_run):
    code, shown = dry_run("--config", DEMO, "--environment", "SearchEnv", "--load_in_8bit", "true")
    assert code == 1
    assert shown.count("PROBLEM") == 2


# Ends the process when the first library is imported that would look for the network.
WATCH = """
import os, runpy, sys
class Watch:
    def find_spec(self, name, *rest):
        if name == "huggingface_hub":
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
