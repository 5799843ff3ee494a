"""Both configurations parse from a command line and from YAML, with the fields that PPO scripts set."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from trl import TrlParser

from trl_stppo import PPOConfig, STPPOConfig

CONFIGS = (PPOConfig, STPPOConfig)
SCRIPT_FIELDS = {
    "sft_model_path": "sft",
    "reward_model_path": "rm",
    "local_rollout_forward_batch_size": 2,
    "ds3_gather_for_generation": False,
    "stop_token": "eos",
    "missing_eos_penalty": 1.0,
    "num_ppo_epochs": 2,
    "total_episodes": 32,
}


@pytest.mark.parametrize("cls", CONFIGS)
@pytest.mark.parametrize("source", ["command line", "yaml"])
def test_the_fields_of_ppo_scripts_parse(source, cls, tmp_path: Path):
    fields = {**SCRIPT_FIELDS, "output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    if source == "yaml":
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(fields))
        words = ["--config", str(tmp_path / "config.yaml")]
    else:
        words = [word for key, value in fields.items() for word in (f"--{key}", str(value))]
    (args,) = TrlParser((cls,)).parse_args_and_config(words)
    assert {key: getattr(args, key) for key in SCRIPT_FIELDS} == SCRIPT_FIELDS
    assert args.num_iterations == 2


def test_the_parser_reads_st_ppos_own_fields(tmp_path: Path):
    fields = {
        "output_dir": str(tmp_path),
        "bf16": False,
        "variant": None,
        "importance_sampling_level": "sequence",
        "stabilizers": ["winners", "share"],
        "stop_when": ["reward_std < 0.1 for 2", "turns/mean > 9"],
        "eval_generation_kwargs": {"temperature": 0.0},
        "cliprange_value": None,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(fields))
    (args,) = TrlParser((STPPOConfig,)).parse_args_and_config(
        ["--config", str(tmp_path / "config.yaml"), "--clip_bias_power", "2"]
    )
    assert args.variant is None
    assert args.cliprange_value is None
    assert (args.importance_sampling_level, args.clip_bias_power) == ("sequence", 2.0)
    assert args.stabilizers == ["winners", "share"]
    assert args.stop_when == ["reward_std < 0.1 for 2", "turns/mean > 9 for 5"]
    assert args.eval_generation_kwargs == {"temperature": 0.0}


def test_conditions_and_dictionaries_parse_as_flags(tmp_path: Path):
    conditions = ["reward_std < 0.01 for 5", "policy/entropy>3"]
    (args,) = TrlParser((PPOConfig,)).parse_args_and_config(
        [
            *("--output_dir", str(tmp_path), "--bf16", "false", "--stop_when", *conditions),
            *("--eval_generation_kwargs", '{"temperature": 0.5, "top_k": 3}'),
        ]
    )
    assert args.stop_when == ["reward_std < 0.01 for 5", "policy/entropy > 3 for 5"]
    assert args.eval_generation_kwargs == {"temperature": 0.5, "top_k": 3}
