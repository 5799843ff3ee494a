"""Every name that docs/migration.md gives as ours exists, and no setting of TRL's PPO is left out."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import trl_stppo
from trl_stppo import PPOConfig, PPOTrainer, STGRPOConfig, STPPOConfig
from trl_stppo.recipes.search import SearchEnv

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migration.md"
NAME = re.compile(r"`([A-Za-z_]\w*)(?:=[^`]*)?`")
# Own fields of TRL 1.12's PPOConfig.
OF_PPO_CONFIG = [
    *(
        "dataset_num_proc", "num_mini_batches", "total_episodes",
        "local_rollout_forward_batch_size", "num_sample_generations",
    ),
    *("response_length", "stop_token", "stop_token_id", "temperature", "missing_eos_penalty"),
    *("sft_model_path", "world_size", "num_total_batches", "micro_batch_size", "local_batch_size"),
    *(
        "batch_size", "local_mini_batch_size", "mini_batch_size", "reward_model_path",
        "model_adapter_name",
    ),
    *("ref_adapter_name", "num_ppo_epochs", "whiten_rewards", "kl_coef", "kl_estimator"),
    *("cliprange", "vf_coef", "cliprange_value", "gamma", "lam"),
    *("ds3_gather_for_generation", "learning_rate"),
]  # fmt: skip
# Values and column names that stand in a column of ours.
OTHERS = {"gae", "grpo", "k1", "k3", "turn", "turn_truncate"}


def tables(text: str) -> list[list[list[str]]]:
    """Rows of cells of each table, its header first."""
    blocks = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    return [[row.strip("|").split("|") for row in block.splitlines()] for block in blocks]


def ours() -> list[tuple[str, str]]:
    """Names in the columns "here", each with its row."""
    found = []
    for header, _, *rows in tables(PAGE.read_text()):
        columns = [i for i, cell in enumerate(header) if cell.strip() == "here"]
        found += [(n, "|".join(row)) for row in rows for i in columns for n in NAME.findall(row[i])]
    return found


def known(name: str) -> bool:
    settings = {f.name for config in (STPPOConfig, STGRPOConfig) for f in fields(config)}
    arguments = set(inspect.signature(PPOTrainer.__init__).parameters)
    arguments |= set(inspect.signature(SearchEnv.__init__).parameters)
    return name in settings | arguments | {"SearchEnv"} | set(trl_stppo.__all__) | OTHERS


@pytest.mark.parametrize(("name", "row"), ours(), ids=lambda value: value[:40])
def test_our_names_exist(name, row):
    assert known(name), row


def test_the_tables_are_read():
    assert len(ours()) > 70
    assert not known("entropy_coeff")


def test_no_setting_of_trls_ppo_is_left_out():
    text = PAGE.read_text()
    section = text[text.index("## From TRL's PPOTrainer") : text.index("## From verl")]
    assert [name for name in OF_PPO_CONFIG if f"`{name}`" not in section] == []


def test_settings_that_are_said_to_be_the_same_are():
    have, checked = {f.name for f in fields(PPOConfig)}, 0
    for header, _, *rows in tables(PAGE.read_text()):
        if header[0].strip() not in ("TRL 1.12", "GRPOConfig"):
            continue
        for row in rows:
            if row[1].strip().startswith("the same") and "function" not in row[0]:
                assert set(NAME.findall(row[0])) <= have, row
                checked += 1
    assert checked > 8


DEFAULTS = re.compile(r"`(\w+)`,? \(?`?([\w.-]+)`? unless set")


def test_defaults_that_are_given_are_the_defaults(tmp_path):
    config, checked = STPPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False), 0
    for header, _, *rows in tables(PAGE.read_text()):
        for row in rows:
            for i in (i for i, cell in enumerate(header) if cell.strip() == "here"):
                for name, value in DEFAULTS.findall(row[i]):
                    default = getattr(config, name)
                    assert str(default) == value or float(default) == float(value), row
                    checked += 1
    assert checked >= 6
