"""The table of the settings that people set, at the beginning of docs/configuration.md.

Run it to write the table anew; a test holds the page to what it makes.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from config_table import default_of

from trl_stppo import STPPOConfig
from trl_stppo.trainer.ppo_config import ALIASES

PAGE = Path(__file__).resolve().parents[1] / "configuration.md"
BEGIN, END = (
    "<!-- settings: docs/_ext/settings_table.py writes them -->",
    "<!-- end of settings -->",
)
NAMES = (
    *("output_dir", "variant", "stabilizers", "total_episodes"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches"),
    *("num_ppo_epochs", "learning_rate", "critic_learning_rate", "cliprange", "kl_coef"),
    *("gamma", "lam", "num_generations"),
    *("max_turns", "max_turn_tokens", "max_completion_length"),
    *("use_vllm", "eval_steps", "save_steps", "seed"),
)
# Texts for upstream's settings whose own texts are about something else or say too much.
UPSTREAM = {
    "output_dir": "Folder of checkpoints, log, recorded episodes and the trained agent.",
    "per_device_train_batch_size": "Episodes per micro-batch and process.",
    "learning_rate": "Learning rate of the policy.",
    "max_completion_length": "Tokens of a whole episode after the prompt, observations included.",
    "use_vllm": "Sample with vLLM, colocated or from a server.",
    "eval_steps": "Optimizer steps between evaluations, with eval_strategy='steps'.",
    "save_steps": "Optimizer steps between checkpoints.",
    "seed": "Seed of weights, rows, sampling and environments.",
}


def table() -> list[str]:
    """Lines of the table."""
    known = {spec.name: spec for spec in dataclasses.fields(STPPOConfig)}
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for name in NAMES:
        meaning = UPSTREAM.get(name) or known[name].metadata["help"]
        default = default_of(known[ALIASES.get(name, name)])
        lines.append(f"| `{name}` | `{default}` | {meaning} |".replace("`None`", "none"))
    return lines


def written(text: str) -> str:
    """The page with the table as it should be."""
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return "\n".join([before + BEGIN, "", *table(), "", END + after])


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
    sys.stdout.write(f"{PAGE}: {len(NAMES)} settings in the table\n")
