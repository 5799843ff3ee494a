"""`train_stppo.py --dry_run`: every shipped file passes, and what would not start says why."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import transformers
from datasets import Dataset

from tests.script_kit import AGENT, ROOT, scripts, small_data
from trl_stppo.trainer.stgrpo_config import GROUP_VARIANTS
from trl_stppo.trainer.stppo_config import VARIANTS

CONFIGS = sorted((ROOT / "scripts" / "configs").rglob("*.yaml"))
DEMO = str(ROOT / "scripts" / "configs" / "demo.yaml")


@pytest.fixture(scope="module")
def script():
    with scripts() as module:
        yield module


@pytest.fixture
def dry_run(script, capsys, monkeypatch):
    """Runs the dry run of a file; gives the exit status and what was printed, table lines joined."""

    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")

    for name in ("AutoModelForCausalLM", "AutoModelForSequenceClassification"):
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", refuse)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            script("train_stppo").start([*words, "--dry-run"])  # the same as --dry_run
        return ended.value.code, re.sub(r"[ │]+", " ", capsys.readouterr().out)

    return run


def launcher_of(path: Path) -> list[str]:
    """The flag for the file that a configuration's own first lines launch it with."""
    found = re.search(r"--config_file (\S+)", path.read_text())
    return ["--dry_run_accelerate_config", str(ROOT / found[1])] if found else []


def variants_of(path: Path) -> list[str]:
    return list(GROUP_VARIANTS if path.stem.endswith("_grpo") else VARIANTS)


def cases() -> list[tuple[Path, str]]:
    """All variants of some files, and the file's own of the others, which differ in size and task."""
    own = [(path, "") for path in CONFIGS]
    every = [path for path in CONFIGS if "medical" not in path.stem and "48" not in path.stem]
    return own + [(path, variant) for path in every for variant in variants_of(path)]


@pytest.mark.parametrize(("path", "variant"), cases(), ids=lambda v: getattr(v, "stem", v))
def test_every_shipped_file_passes(path, variant, dry_run):
    flags = ["--variant", variant] if variant else []
    code, shown = dry_run("--config", str(path), *launcher_of(path), *flags)
    assert (code, "PROBLEM" in shown) == (0, False), shown
    if variant:
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
        "updates 2,010",
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
    code, shown = dry_run("--config", DEMO)
    assert code == 0, shown
    assert "processes 2, ZeRO-1" in shown
    assert os.environ["WORLD_SIZE"] == "2"


def test_the_planned_memory_is_what_the_table_of_the_docs_says(dry_run):
    path = ROOT / "scripts" / "configs" / "single_gpu_24gb.yaml"
    assert "about 13.1 GiB at the peak (rollout)" in dry_run("--config", str(path))[1]


def test_the_planned_memory_is_what_a_built_trainer_expects(script, dry_run, tmp_path):
    """Both for the shipped model, whose shape is read from its folder; prompts included."""
    shown = dry_run("--config", DEMO)[1]
    plan, agents = script("plan_rows"), script("agents")
    words = ["--config", DEMO, "--output_dir", str(tmp_path), "--report_to", "none"]
    args, config, model_args, _ = agents.parse_flags(agents.TrainArguments, words)
    setup = script("planned_memory").planned_setup(
        args, config, model_args, engine="none", processes=1, prompt=23
    )
    shape = script("planned_memory").known_geometry(AGENT)
    assert setup.trainable == shape.parameters
    assert setup.critic_trainable == shape.critic_parameters
    assert setup.rows == 8
    peak = script("planned_memory").peak_of(setup)[0]
    assert f"about {peak / 2**30:.1f} GiB" in shown
    assert plan.Plan(args, config, model_args, "none", 1).prompt == 0


# ------------------------------------------------------------------- what would not start


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--variant", "so-ppo"], "`variant='so-ppo'`: allowed are 'ppo'"),
        (["--environment", "SearchEnv"], "write it as module:name"),
        (["--environment_kwargs", "top_k=3"], "is no JSON object"),
        (["--environment_kwargs", '{"top_p": 3}'], "unexpected keyword argument 'top_p'"),
        (["--environment", "none", "--max_turns", "3"], "`max_turns=3` limits episodes"),
        (["--load_in_4bit", "true"], "Set `use_peft: true`"),
        (["--critic_lora_r", "4"], "`critic_lora_r=4` is the rank"),
        (["--value_model_lora_r", "4", "--use_peft", "true"], "Set critic_lora_r"),
        (["--value_model_lora_r", "0"], "value_model_lora_r >= 1"),
        (["--model_name_or_path", "./nowhere"], "`model_name_or_path=./nowhere` is no folder"),
        (["--gradient_accumulation_steps", "15"], "must be a multiple of `num_mini_batches=4`"),
        (["--per_device_train_batch_size", "800"], "fewer than the 12800 prompts"),
        (["--reward_funcs", "trl_stppo.rewards:nothing"], "has no attribute 'nothing'"),
        (["--dry_run_processes", "0"], "`dry_run_processes=0`"),
        (["--dry_run_accelerate_config", "nowhere.yaml"], "nowhere.yaml` does not exist"),
        (["--sync_ref_model", "true", "--beta", "0.1", "--use_peft", "true"], "`sync_ref_model=True`"),
    ],
)  # fmt: skip
def test_what_would_not_start_is_said_with_the_fix(flags, said, dry_run):
    code, shown = dry_run("--config", DEMO, *flags)
    assert code == 1
    assert said in shown
    assert "this would not start" in shown


def test_all_problems_are_shown_at_once(dry_run):
    code, shown = dry_run(
        *("--config", DEMO, "--environment", "SearchEnv", "--load_in_8bit", "true")
    )
    assert code == 1
    assert "2 problem(s)" in shown


@pytest.mark.parametrize(
    ("engine", "flags", "said"),
    [
        ("zero3", [], "A copied critic of a fully trained policy is not supported with ZeRO-3"),
        ("fsdp2", ["--use_peft", "true"], "A shared critic of a LoRA policy is not supported"),
        ("zero2", ["--optim", "adamw_8bit"], "`optim='adamw_8bit'` is not supported with ZeRO-2"),
        ("zero2", ["--rollout_staleness", "1"], "`rollout_staleness=1`"),
        ("multi_gpu", ["--fp16", "true"], "`fp16=True` is not supported"),
    ],
)
def test_what_an_engine_refuses_is_refused_here(engine, flags, said, dry_run):
    path = ROOT / "scripts" / "accelerate_configs" / f"{engine}.yaml"
    code, shown = dry_run("--config", DEMO, "--dry_run_accelerate_config", str(path), *flags)
    assert code == 1
    assert said in shown


@pytest.mark.parametrize(
    ("engine", "before", "after", "said"),
    [
        ("zero2", "offload_param_device: none", "offload_param_device: cpu", "`offload_param` to"),
        ("fsdp2", "offload_params: false", "offload_params: true", "`fsdp_offload_params: true`"),
        ("fsdp2", "fsdp_version: 2", "fsdp_version: 1", "FSDP1 is not supported"),
        ("zero2", "zero_stage: 2", "zero_stage: 0", "ZeRO-0 is not supported"),
        ("multi_gpu", "MULTI_GPU", "MEGATRON_LM", "`distributed_type=MEGATRON_LM`"),
    ],
)
def test_options_of_an_engine_are_read_from_its_file(
    engine, before, after, said, dry_run, tmp_path
):
    text = (ROOT / "scripts" / "accelerate_configs" / f"{engine}.yaml").read_text()
    assert before in text
    (tmp_path / "mine.yaml").write_text(text.replace(before, after))
    code, shown = dry_run(
        *("--config", DEMO, "--dry_run_accelerate_config", str(tmp_path / "mine.yaml"))
    )
    assert code == 1
    assert said in shown


def test_data_that_is_here_is_checked(dry_run, tmp_path):
    data = small_data(tmp_path / "search")
    flags = ("--config", DEMO, "--eval_episodes", "4", "--per_device_train_batch_size", "4")
    code, shown = dry_run(*flags, "--dataset_name", data)
    assert code == 0, shown
    assert "here, 64 rows" in shown
    code, shown = dry_run(*flags, "--dataset_name", data, "--dataset_train_split", "training")
    assert code == 1
    assert "`dataset_train_split='training'`" in shown
    code, shown = dry_run(*flags, "--dataset_name", data, "--dataset_test_split", "dev")
    assert code == 1
    assert "has no split 'dev'" in shown


def test_rows_without_a_prompt_are_found(dry_run, tmp_path):
    Dataset.from_dict({"text": ["a"] * 64}).to_parquet(str(tmp_path / "train.parquet"))
    flags = ("--dataset_name", str(tmp_path), "--environment", "none", "--eval_episodes", "0")
    rewards = ("--reward_funcs", "trl_stppo.rewards:f1_reward")
    text = re.sub(r"max_turn.*|environment.*", "", Path(DEMO).read_text())
    (tmp_path / "alone.yaml").write_text(text)
    config = str(tmp_path / "alone.yaml")
    code, shown = dry_run(
        "--config", config, *flags, *rewards, "--per_device_train_batch_size", "1"
    )
    assert code == 1
    assert "neither `prompt`" in shown
