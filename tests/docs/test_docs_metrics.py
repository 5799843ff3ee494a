"""docs/watching.md has every figure that training logs, and no other."""

from typing import Any

import pytest
import transformers
from datasets import Dataset

from tests.kit.docs_kit import CODE, DOCS, prose, table_rows
from tests.kit.script_kit import AGENT
from trl_stppo import STGRPOConfig, STGRPOTrainer, STPPOConfig, STPPOTrainer

SMALL = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2,
    "max_turns": 2, "max_turn_tokens": 4, "max_completion_length": 24, "logging_steps": 1,
    "stabilizers": ["winners", "share"], "use_cpu": True, "bf16": False,
    "gradient_checkpointing": False, "save_strategy": "no", "report_to": "none",
    "disable_tqdm": True, "rollout_overlap": True, "num_ppo_epochs": 1,
}  # fmt: skip
# What needs a mixture of experts, tools, an agent, or vLLM; and what is logged at the end of a run.
ELSEWHERE = (*("aux_loss", "tools/", "contexts/", "sampling/importance_sampling_ratio/"),)


class Room:
    """Ends in the second turn."""

    def reset(self, **row: Any) -> tuple[str, dict[str, Any]]:
        self._left = 2
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        info = {"valid_action": True, "success": True}
        return "on", float(len(action)), self._left == 0, False, info


def polite(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    return [0.5] * len(completions)


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in the logs of three short runs with everything switched on."""
    names: set[str] = set()
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "go"}]}] * 8)
    groups = {**SMALL, "stabilizers": ["trust_region", "share"], "num_generations": 2}
    for kind, make, settings in (
        (STPPOTrainer, STPPOConfig, {**SMALL, "beta": 0.1}),
        (STPPOTrainer, STPPOConfig, {**SMALL, "stabilizers": ["triggered"]}),
        (STGRPOTrainer, STGRPOConfig, groups),
    ):
        config = make(str(tmp_path_factory.mktemp("run")), **settings)
        paid = {"turn_reward_funcs": [polite] if kind is STPPOTrainer else None}
        trainer = kind(AGENT, [polite], config, rows, environment_factory=Room, **paid)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        names |= {name for line in trainer.state.log_history for name in line} - {"step"}
    return names


def documented() -> set[str]:
    """Names in the tables, in the last paragraph, and of the reasons for which episodes end."""
    page = DOCS / "watching.md"
    ends = table_rows(DOCS / "environments.md", "Limits and stop reasons")
    rows = {name for row in table_rows(page, "Figures") for name in CODE.findall(row[0])}
    last = prose(page).strip().split("\n\n")[-1]
    return rows | set(CODE.findall(last)) | {f"stop_reason/{row[0].strip('`')}" for row in ends}


def test_everything_that_is_logged_is_documented(logged):
    generic = {name.replace("polite", "<function>").replace("Room", "<function>") for name in logged}
    reasons = {name for name in generic if name.startswith("stop_reason/")}
    environment = {"rewards/environment/mean", "rewards/environment/std"}
    assert generic - reasons - environment - documented() == set()
    assert reasons <= documented()


def test_everything_that_is_documented_is_logged(logged):
    plain = {name for name in documented() if "<" not in name and "*" not in name}
    assert {name for name in plain - logged if not name.startswith(ELSEWHERE)} == set()
