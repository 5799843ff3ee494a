"""`train_stppo.py --dry_run`: every shipped file passes, and what would not start says why."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from datasets import Dataset

from tests.script_kit import AGENT, ROOT, small_data
from trl_stppo.models.memory import estimate
from trl_stppo.trainer import checkpoint_files
from trl_stppo.trainer.stgrpo_config import GROUP_VARIANTS
from trl_stppo.trainer.stppo_config import VARIANTS

CONFIGS = sorted((ROOT / "scripts" / "configs").rglob("*.yaml"))
DEMO = str(ROOT / "scripts" / "configs" / "demo.yaml")


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
    """Each file as it is, and all variants of one with a critic and one without."""
    every = [path for path in CONFIGS if path.stem in ("demo", "search_1.5b_1gpu_grpo")]
    assert len(every) == 2
    return [(path, "") for path in CONFIGS] + [(p, v) for p in every for v in variants_of(p)]


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
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"},
         "`fsdp_offload_params: true`"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "`fsdp_state_dict_type` SHARDED"),
        ({"ACCELERATE_USE_DEEPSPEED": "true",
          "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, "`offload_optimizer` to 'cpu'"),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "nowhere.json"},
         "`deepspeed_config_file=nowhere.json` cannot be read"),
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


def test_the_planned_memory_is_what_a_built_trainer_expects(script, dry_run, tmp_path):
    """Both for the shipped model, whose shape is read from its folder; prompts included."""
    shown = dry_run("--config", DEMO)[1]
    plan, agents = script("plan_rows"), script("agents")
    words = ["--config", DEMO, "--output_dir", str(tmp_path), "--report_to", "none"]
    run = plan.Plan(*agents.parse_flags(agents.TrainArguments, words), prompt=23)
    setup = plan.planned_setup(run)
    shape = plan.known_geometry(AGENT)
    assert setup.trainable == shape.parameters
    assert setup.critic_trainable == shape.critic_parameters
    assert setup.rows == 8
    assert f"about {estimate(setup).peak / 2**30:.1f} GiB" in shown


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--use_vllm", "true"], "not known: vLLM on the same card reserves a share of it"),
        (["--lora_modules_to_save", "embed_tokens"], "not known: what lora_modules_to_save trains"),
        (["--lora_target_modules", "q_proj"], "not known: only all-linear is counted"),
    ],
)
def test_memory_that_the_model_does_not_cover_is_not_known(flags, said, dry_run):
    path = ROOT / "scripts" / "configs" / "single_gpu_24gb.yaml"
    assert said in dry_run("--config", str(path), *flags)[1]


def test_the_options_of_loading_are_merged(script, dry_run):
    """A flag that was set wins over `model_init_kwargs`, and its default does not."""
    options, model_config = script("agent_models").model_options, script("agents").ModelConfig
    given = {"dtype": "bfloat16", "low_cpu_mem_usage": True}
    assert options(model_config(), given) == {**given, "revision": "main"}
    assert options(model_config(dtype="float16"), given)["dtype"] == "float16"
    assert options(model_config())["dtype"] == "float32"
    kwargs = ("--model_init_kwargs", '{"dtype": "bfloat16"}')
    assert "fully trained, bfloat16" in dry_run("--config", DEMO, *kwargs)[1]


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
        (["--reward_weights", "1", "2"], "`reward_weights` has 2 entries for 0 reward functions"),
        (["--turn_reward_weights", "1"], "`turn_reward_weights` has 1 entries for 0 turn"),
        (["--value_model_name_or_path", "/nowhere/x"], "`value_model_name_or_path=/nowhere/x` is no"),
        (["--resume_from_checkpoint", "/nowhere"], "`resume_from_checkpoint='/nowhere'` is not a"),
        (["--resume_from_checkpoint", "true"], "holds no checkpoint to resume from"),
        (["--eval_strategy", "steps", "--eval_steps", "9", "--dataset_test_split", "dev",
          "--dataset_name", "DATA"], "`eval_strategy=steps`, but"),
        (["--output_dir", f"{__file__}/run"], "test_dry_run.py is a file"),
        (["--use_peft", "true", "--lora_target_modules", "nosuch"], "nosuch"),
        (["--eval_environment_kwargs", "top_k=3"], "`eval_environment_kwargs=top_k=3` is no JSON"),
        (["--report_to", "nobody"], "`report_to=nobody`: allowed are"),
    ],
)  # fmt: skip
def test_what_would_not_start_is_said_with_the_fix(flags, said, dry_run, tmp_path):
    flags = [small_data(tmp_path / "data") if word == "DATA" else word for word in flags]
    code, shown = dry_run("--config", DEMO, "--output_dir", str(tmp_path / "run"), *flags)
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
        ("zero2", "zero_stage: 2", "deepspeed_config_file: {}/three.json",
         "A copied critic of a fully trained policy is not supported with ZeRO-3"),
        ("multi_gpu", "mixed_precision: bf16", "mixed_precision: fp16", "Mixed precision 'fp16'"),
        ("multi_gpu", "num_processes: 8", "num_processes: auto", "`num_processes: auto` in"),
        ("fsdp2", "  fsdp_state_dict_type: FULL_STATE_DICT\n", "", "`fsdp_state_dict_type` SHARDED"),
        ("multi_gpu", "MULTI_GPU", "MEGATRON_LM", "`distributed_type=MEGATRON_LM`"),
    ],
)  # fmt: skip
def test_options_of_an_engine_are_read_from_its_file(
    engine, before, after, said, dry_run, tmp_path
):
    (tmp_path / "three.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    text = (ROOT / "scripts" / "accelerate_configs" / f"{engine}.yaml").read_text()
    assert before in text
    (tmp_path / "mine.yaml").write_text(text.replace(before, after.format(tmp_path)))
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


def test_packages_that_are_missing_are_named(dry_run, monkeypatch):
    """Whatever is installed: none of them is found."""
    found = importlib.util.find_spec
    hidden = ("flash_attn", "kernels", "liger_kernel", "wandb", "vllm", "bitsandbytes", "deepspeed")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in hidden else found(name, *a)
    )
    flags = "--attn_implementation flash_attention_2 --use_liger_kernel true --report_to wandb"
    flags += " --use_vllm true --optim paged_adamw_8bit"
    path = ROOT / "scripts" / "accelerate_configs" / "zero2.yaml"
    launch = ("--dry_run_accelerate_config", str(path))
    code, shown = dry_run("--config", DEMO, *flags.split(), *launch)
    assert code == 1
    for said in ("flash_attn or kernels", "liger_kernel", "wandb", "vllm", "bitsandbytes"):
        assert re.search(f"PROBLEM: `.*` needs the package {said}, which is not installed", shown)
    assert "note: `distributed_type=DEEPSPEED` needs the package deepspeed" in shown


def test_a_checkpoint_that_a_killed_run_left_unpublished_counts(dry_run, tmp_path):
    staged = tmp_path / checkpoint_files.STAGING / "checkpoint-4"
    staged.mkdir(parents=True)
    flags = ("--output_dir", str(tmp_path), "--resume_from_checkpoint", "true")
    assert dry_run("--config", DEMO, *flags)[0] == 1
    checkpoint_files.seal(staged, {})
    assert dry_run("--config", DEMO, *flags)[0] == 0
    assert staged.exists(), "nothing is changed"


def test_streams_are_read(dry_run, tmp_path):
    flags = ("--dataset_streaming", "true", "--dataset_name", small_data(tmp_path / "data"))
    code, shown = dry_run("--config", DEMO, *flags)
    assert code == 0, shown
    assert "here, as a stream" in shown
    (tmp_path / "endless.yaml").write_text(re.sub("total_episodes.*", "", Path(DEMO).read_text()))
    code, shown = dry_run("--config", str(tmp_path / "endless.yaml"), *flags)
    assert code == 1
    assert "`dataset_streaming=True` leaves the length" in shown


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
def test_a_dry_run_is_asked_for_as_the_parser_reads_it(
    words, wanted, script, tmp_path, monkeypatch
):
    for name, value in (("on", "true"), ("t", "t"), ("off", "false")):
        (tmp_path / name).write_text(f"dry_run: {value}\n")
    monkeypatch.chdir(tmp_path)
    given, early, agents = words.split(), script("early"), script("agents")
    assert early.wants_dry_run(given) is wanted
    flags = [*given, "--use_cpu", "true", "--bf16", "false"]
    assert agents.parse_flags(agents.TrainArguments, flags)[0].dry_run is wanted
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(sys, "argv", ["train_stppo.py", *given])
    early.quieten()
    assert os.environ.pop("HF_HUB_OFFLINE", None) == ("1" if wanted else None)


def test_whoever_asks_to_look_only_is_not_trained_for(script, monkeypatch):
    monkeypatch.setattr(script("train_stppo"), "make_trainer", None)
    agents = script("agents")
    parsed = agents.parse_flags(
        agents.TrainArguments, ["--config", DEMO, "--use_cpu", "true", "--dry_run", "t"]
    )
    with pytest.raises(ValueError, match="nothing is trained"):
        script("train_stppo").main(*parsed)


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
        timeout=120,
    )
    assert result.returncode == status
