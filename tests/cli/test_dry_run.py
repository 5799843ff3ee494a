"""`trl-stppo train --dry_run`: every variant passes, the plan is right, and what would not start says why."""

import os
from pathlib import Path

import pytest

from tests.hub.hub_kit import saved_base
from tests.kit.script_kit import DEMO, ROOT, small_data
from tests.kit.tiers import quick
from tests.kit.vision import vision_model
from trl_stppo.trainer.stgrpo_config import GROUP_VARIANTS
from trl_stppo.trainer.stppo_config import VARIANTS

PAPER = ROOT / "scripts" / "configs" / "paper"
# Every variant with a critic and without one; all files there are in docs/test_shipped_files.py.
CASES = [(DEMO, variant) for variant in VARIANTS]
CASES += [(str(PAPER / "search_1.5b_1gpu_grpo.yaml"), variant) for variant in GROUP_VARIANTS]
LIGHT = [CASES[0], CASES[len(VARIANTS) - 1], CASES[-1]]


@pytest.mark.parametrize(("path", "variant"), quick(CASES, *LIGHT), ids=lambda v: Path(v).stem)
def test_every_variant_passes(path, variant, dry_run):
    code, shown = dry_run("--config", path, "--variant", variant)
    assert (code, "PROBLEM" in shown) == (0, False), shown
    assert f"variant {variant}:" in shown


@pytest.mark.long
def test_the_number_of_processes_changes_the_batch(dry_run, monkeypatch):
    one = dry_run("--config", DEMO)[1]
    monkeypatch.setenv("WORLD_SIZE", "4")
    four = dry_run("--config", DEMO, "--total_episodes", "4096")[1]
    assert "128 episodes (one" in one
    assert "processes 4 " in four
    assert "512 episodes (one" in four
    assert "8 rollout batches" in four
    assert os.environ["WORLD_SIZE"] == "4"


@pytest.mark.parametrize(("flags", "named", "code"), [
    (["--variant", "so-ppo"], "`variant='so-ppo'`", 2),
    (["--environment", "SearchEnv"], "`SearchEnv`", 1),
    (["--environment", "none", "--max_turns", "3"], "`max_turns=3`", 1),
    (["--load_in_4bit", "true"], "`use_peft: true`", 1),
    (["--model_name_or_path", "./nowhere"], "`model_name_or_path=./nowhere`", 1),
    (["--reward_funcs", "scripts.search.search_env.rewards:nothing"], "'nothing'", 1),
    (["--reward_weights", "1", "2"], "`reward_weights`", 1),
    (["--eval_strategy", "steps", "--eval_steps", "9", "--dataset_test_split", "dev",
      "--eval_episodes", "0", "--dataset_name", "DATA"], "`eval_strategy=steps`", 1),
    (["--environment_kwargs", "top_k=3"], "`environment_kwargs=top_k=3`", 1),
])  # fmt: skip
def test_what_a_training_refuses_is_refused_here(flags, named, code, dry_run, tmp_path):
    flags = [small_data(tmp_path / "data") if word == "DATA" else word for word in flags]
    words = ("--config", DEMO, "--output_dir", str(tmp_path / "run"))
    found, shown = dry_run(*words, *flags)
    assert found == code
    assert named in shown


def test_the_cost_of_an_image_is_told(dry_run, tmp_path):
    for part in vision_model("LLaVA"):
        part.save_pretrained(tmp_path / "sees")
    (tmp_path / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "look: "}]}\n' * 8)
    words = ["--model_name_or_path", str(tmp_path / "sees"), "--output_dir", str(tmp_path / "run")]
    words += ["--dataset_name", str(tmp_path / "rows.jsonl"), "--total_episodes", "16"]
    words += ["--environment", "tests.kit.vision_runs:Pictures"]
    code, shown = dry_run(*words, "--max_completion_length", "200", "--bf16", "false")
    assert code == 0, shown
    # 3 x 16 x 16 numbers of 32 bits.
    assert "first image [image 24x16, 16 tokens] are 0.0029 MiB of tensors" in shown
    assert "first image" not in dry_run("--config", DEMO)[1]


def test_a_template_that_cannot_render_tools_is_a_problem(dry_run, tmp_path):
    base, rows = saved_base(tmp_path / "base"), tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": [{"role": "user", "content": "hi"}]}\n' * 40)
    words = ("--model_name_or_path", base, "--dataset_name", str(rows), "--max_steps", "1")
    words += ("--output_dir", str(tmp_path / "run"))
    tools = "tests.trainer.loop.test_tool_environments:PayingEnv"
    code, shown = dry_run(*words, "--environment", tools)
    assert code == 1
    assert "cannot render tool calls" in shown
