"""Every YAML in scripts/configs parses, fits its card, and docs/one_gpu.md says what is computed."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from tests.kit.script_kit import ROOT
from trl_stppo import STPPOConfig
from trl_stppo.cli.arguments import TrainArguments

CONFIGS = sorted((ROOT / "scripts" / "configs").glob("*.yaml"))
SINGLE_GPU = [path for path in CONFIGS if path.stem.startswith("single_gpu")]
DOCS = (ROOT / "docs" / "one_gpu.md").read_text().splitlines()


def parse(path: Path, folder: Path) -> tuple[Any, STPPOConfig, ModelConfig]:
    """What `trl-stppo train` makes of a file; on the CPU, because a card may be missing."""
    parser = TrlParser((TrainArguments, STPPOConfig, ModelConfig))
    words = ["--config", str(path), "--use_cpu", "true", "--output_dir", str(folder)]
    return parser.parse_args_and_config(words)


def card(path: Path) -> int:
    """GB of the card that a file is for."""
    return int(re.search(r"(\d+)gb", path.stem).group(1))


def test_there_is_a_file_for_each_card():
    assert [card(path) for path in SINGLE_GPU] == [16, 24, 48, 80]


@pytest.mark.parametrize("path", SINGLE_GPU, ids=lambda path: path.stem)
def test_the_single_gpu_files_mean_qlora(path, tmp_path):
    _, args, model = parse(path, tmp_path)
    quantised, adapters = get_quantization_config(model), get_peft_config(model)
    assert quantised.load_in_4bit
    assert quantised.bnb_4bit_quant_type == "nf4"
    assert quantised.bnb_4bit_use_double_quant
    assert quantised.bnb_4bit_compute_dtype == torch.bfloat16
    assert (adapters.r, adapters.target_modules) == (16, "all-linear")
    assert args.bf16
    assert args.gradient_checkpointing
    assert (args.steps_per_generation, args.num_mini_batches) == (64, 4)


def test_the_single_gpu_files_fit_and_the_docs_say_how_well(script, capsys):
    script("memory").show_files()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(SINGLE_GPU)
    assert {*lines} <= {*DOCS}
    for path, line in zip(SINGLE_GPU, lines, strict=True):
        size = float(re.search(r"([\d.]+) GiB", line)[1])
        assert size <= 0.92 * card(path)


@pytest.mark.slow
def test_the_docs_say_what_fits(script, capsys):
    script("memory").show_fits()
    assert {*capsys.readouterr().out.splitlines()} <= {*DOCS}
