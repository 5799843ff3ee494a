"""Flags and files: what is read, and wrong words with exit code 2 and the name that is wrong."""

import os

import pytest

from trl_stppo import STGRPOConfig, STGRPOTrainer, STPPOConfig, STPPOTrainer
from trl_stppo.cli.agents import parse_flags
from trl_stppo.cli.flags import TrainArguments, early
from trl_stppo.cli.main import main

CPU = ("--use_cpu", "true", "--bf16", "false")
RUN = ("--model_name_or_path", "a", "--dataset_name", "b", "--reward_funcs", "c:d")


@pytest.mark.parametrize(("words", "named"), [
    ("trian", "`trian`"),
    ("train --max_turn 3", "--max_turn"),
    ("train --learning 1", "--learning"),
    ("evaluate --dry_run", "--dry_run"),
    ("train --optim adamw_troch", "--optim"),
    ("train run.yaml", "run.yaml"),
    ("train --variant so-ppo --use_cpu --bf16 false", "`variant='so-ppo'`"),
    ("train --config nowhere.yaml", "nowhere.yaml"),
    ("env check", "MODULE:CLASS"),
    ("env check a:b --row {}", "`a:b`"),
    ("env check scripts.search.search_env:SearchEnv --row [1]", "`row=[1]`"),
])  # fmt: skip
def test_wrong_words_are_named(words, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, *flags = words.split()
    more = RUN if command in ("train", "evaluate") else ()
    assert main([command, *flags, *more]) == 2
    printed = capsys.readouterr()
    assert named in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(("text", "named"), [
    ("max_turns: three", "--max_turns"),
    ("learnin_rate: 1", "--learnin_rate"),
    ("- max_turns", "run.yaml"),
    ("max_turns: [", "line 1"),
])  # fmt: skip
def test_wrong_files_are_named(text, named, capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert main(["train", "--config", str(path), *CPU]) == 2
    shown = capsys.readouterr().err
    assert named in shown
    assert "Traceback" not in shown


def test_a_flag_beats_the_file_and_env_reaches_the_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_FILE", "0")
    (tmp_path / "run.yaml").write_text("max_turns: 3\nseed: 5\nenv:\n  OF_THE_FILE: 1\n")
    words = ["--config", "run.yaml", "--max-turns", "4", "--output_dir", str(tmp_path), *CPU]
    config = parse_flags(TrainArguments, words)[1]
    assert (config.max_turns, config.seed) == (4, 5)
    assert os.environ["OF_THE_FILE"] == "1"


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
    ("--dry-run", True), ("", False), ("--config on", True), ("--config on --dry_run false", False),
])  # fmt: skip
def test_a_dry_run_is_asked_for_as_the_parser_reads_it(words, wanted, tmp_path, monkeypatch):
    (tmp_path / "on").write_text("dry_run: true\n")
    monkeypatch.chdir(tmp_path)
    assert early(words.split()).dry_run is wanted
    assert parse_flags(TrainArguments, [*words.split(), *CPU])[0].dry_run is wanted
