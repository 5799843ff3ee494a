"""Flags and files: what is read, and wrong words with exit code 2 and the name that is wrong."""

import dataclasses
import os

import pytest

from trl_stppo import STGRPOConfig, STGRPOTrainer, STPPOConfig, STPPOTrainer
from trl_stppo.cli.agents import parse_flags
from trl_stppo.cli.flags import TrainArguments, wants_dry_run
from trl_stppo.cli.main import main
from trl_stppo.cli.usage import hint

CPU = ("--use_cpu", "true", "--bf16", "false")
RUN = ("--model_name_or_path", "a", "--dataset_name", "b", "--reward_funcs", "c:d")


@pytest.mark.parametrize(("words", "named"), [
    ("trian", "`train`"),
    ("frobnicate", "`frobnicate`"),
    ("train --max_turn 3", "`max_turns`"),
    ("train --learning 1", "`--learning`"),
    ("evaluate --dry_run", "`--dry_run`"),
    ("train --num_process 2", "`num_processes`"),
    ("train --optim adamw_troch", "--optim"),
    ("train run.yaml", "`run.yaml`"),
    ("train --variant so-ppo", "`variant='so-ppo'`"),
    ("train --config nowhere.yaml", "nowhere.yaml"),
    ("train --config a --config b", "`--config`"),
    ("train --scale_rewards batch --use_cpu --bf16 false", "`scale_rewards='batch'`"),
    ("env check", "MODULE:CLASS"),
    ("env check a:b --row {}", "`a:b`"),
    ("env check scripts.search.search_env:SearchEnv --stict", "`--strict`"),
    ("env play scripts.search.search_env:SearchEnv --row [1]", "`row=[1]`"),
])  # fmt: skip
def test_wrong_words_are_named(words, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, *flags = words.split()
    more = RUN if command in ("train", "evaluate") else ()
    assert main([command, *flags, *more] if flags[:1] != ["run.yaml"] else [command, *flags]) == 2
    printed = capsys.readouterr()
    assert named in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(("text", "named"), [
    ("max_turns: three", "--max_turns"),
    ("learnin_rate: 1", "`learning_rate`"),
    ("- max_turns", "no settings"),
    ("", "no settings"),
    ("max_turns: [", "no YAML"),
    ("max_turns: 3\nseed: 1\nmax_turns: 4", "`max_turns` is in lines 1 and 3"),
    ("max_turns: 2024-01-01", "`max_turns: 2024-01-01`"),
    ("env:\n  A: 1\n  A: 2", "lines 2 and 3"),
    ("datasets: [{path: a, path: b}]", "`path`"),
    ("datasets: [{pth: x}]", "`datasets`"),
    ("config: x", "`config`"),
])  # fmt: skip
def test_wrong_files_are_named(text, named, capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert main(["train", f"--config={path}", *CPU]) == 2
    shown = capsys.readouterr().err
    assert named in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("config", [["--config", "run.yaml"], ["--config=run.yaml"]])
def test_a_flag_beats_the_file_and_env_reaches_the_environment(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_FILE", "0")
    (tmp_path / "run.yaml").write_text("max_turns: 3\nseed: 5\nenv:\n  OF_THE_FILE: 1\n")
    words = [*config, "--max-turns", "4", "--output_dir", str(tmp_path), *CPU]
    config = parse_flags(TrainArguments, words)[1]
    assert (config.max_turns, config.seed) == (4, 5)
    assert os.environ["OF_THE_FILE"] == "1"


def test_a_home_folder_in_a_file_is_the_users(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "run.yaml"
    path.write_text(
        "dataset_name: ~/rows.jsonl\nmodel_name_or_path: ~/model\nvalue_model_name_or_path: ~/critic\n"
        "reward_funcs: [~/a.py, b~/c]\noutput_dir: ~/out\ndatasets: [{path: ~/more}]\n"
    )
    args, config, model = parse_flags(TrainArguments, ["--config", str(path), *CPU])[:3]
    home = str(tmp_path)
    assert (args.dataset_name, model.model_name_or_path) == (f"{home}/rows.jsonl", f"{home}/model")
    assert (args.value_model_name_or_path, config.output_dir) == (f"{home}/critic", f"{home}/out")
    assert args.reward_funcs == [f"{home}/a.py", "b~/c"]
    assert args.row_sources == [f"{home}/more"]


@pytest.mark.parametrize(("words", "trainer", "config"), [
    ([], STPPOTrainer, STPPOConfig),
    (["--variant=st-grpo"], STGRPOTrainer, STGRPOConfig),
    (["--config", "grpo"], STGRPOTrainer, STGRPOConfig),
    (["--config", "grpo", "--variant", "ppo"], STPPOTrainer, STPPOConfig),
    (["--config", "free"], STPPOTrainer, STPPOConfig),
])  # fmt: skip
def test_the_variant_chooses_the_trainer(words, trainer, config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grpo").write_text("variant: grpo\n")
    (tmp_path / "free").write_text("variant: null\n")
    parsed = parse_flags(TrainArguments, [*words, "--output_dir", str(tmp_path), *CPU])
    assert parsed[3] is trainer
    assert type(parsed[1]) is config


@pytest.mark.parametrize(("words", "wanted"), [
    ("--dry_run", True), ("--dry-run", True), ("--dry_run T", True), ("--dry_run=Yes", True),
    ("", False), ("--dry_run 0", False), ("--config on", True), ("--config off", False),
    ("--config on --dry_run false", False),
])  # fmt: skip
def test_a_dry_run_is_asked_for_as_the_parser_reads_it(words, wanted, tmp_path, monkeypatch):
    for name, value in (("on", "true"), ("off", "false")):
        (tmp_path / name).write_text(f"dry_run: {value}\n")
    monkeypatch.chdir(tmp_path)
    assert wants_dry_run(words.split()) is wanted
    assert parse_flags(TrainArguments, [*words.split(), *CPU])[0].dry_run is wanted


@pytest.mark.parametrize(("name", "right"), [
    ("lora_rank", "`lora_r`"), ("use_lora", "`use_peft`"), ("gae_lambda", "`lam`"),
    ("actor_learning_rate", "`learning_rate`"), ("num_epochs", "`num_train_epochs`"),
    ("mini_batch_size", "`num_mini_batches`"), ("ppo_mini_batch_size", "`num_mini_batches`"),
    ("train_batch_size", "`per_device_train_batch_size`"), ("dataset", "`dataset_name`"),
    ("enable_thinking", "`chat_template_kwargs`"), ("warmup_ratio", "`warmup_steps` below 1"),
])  # fmt: skip
def test_names_of_other_libraries_lead_to_ours(name, right):
    known = {spec.name for spec in dataclasses.fields(STPPOConfig)}
    assert right in hint(name, known)
    assert right.split("`")[1] in known | {"lora_r", "use_peft", "dataset_name"}
