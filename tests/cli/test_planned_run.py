"""What a dry run says of a run is what the trainer, once it is built, says of itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.script_kit import DEMO
from trl_stppo.cli import agents, plan_rows, train
from trl_stppo.cli.arguments import TrainArguments
from trl_stppo.cli.planned import planned_setup
from trl_stppo.models.memory import estimate
from trl_stppo.trainer.publishing.describe import describe
from trl_stppo.trainer.watching.memory import setup_of

LORA = ["--use_peft", "true", "--lora_r", "4", "--lora_target_modules", "all-linear"]
SEPARATE = ["--value_model_lora_r", "2"]
GROUPS = ["--variant", "st-grpo", "--num_generations", "4"]
OF_A_CRITIC = ("critic_learning_rate", "gamma", "lam", "kl_coef")


@pytest.mark.parametrize(
    ("flags", "critic", "training"),
    [
        ([], "separate", "fully trained, float32"),
        (LORA, "shared", "LoRA of rank 4, float32"),
        (SEPARATE, "separate, LORA of rank 2", "fully trained, float32"),
        (GROUPS, "none", "fully trained, float32"),
    ],
)
def test_a_planned_run_and_its_trainer_are_described_alike(flags, critic, training, tmp_path):
    settings = yaml.safe_load(Path(DEMO).read_text())
    left_out = OF_A_CRITIC if flags == GROUPS else ()
    settings = {name: value for name, value in settings.items() if name not in left_out}
    (tmp_path / "demo.yaml").write_text(yaml.safe_dump(settings))
    words = [
        "--config",
        str(tmp_path / "demo.yaml"),
        "--output_dir",
        str(tmp_path),
        "--report_to",
        "none",
        *flags,
    ]
    words += ["--use_cpu", "true", "--bf16", "false"]
    parsed = agents.parse_flags(TrainArguments, words)
    trainer = train.make_trainer(*parsed)
    built = describe(trainer, trainer._evaluator._rollout_plan)
    run = plan_rows.Plan(*parsed, train=trainer.train_dataset)
    planned = plan_rows.planned_run(run, trainer._evaluator._rollout_plan)
    if built.adapter is not None:  # which layers there are is known once they are here
        assert len(built.adapter["target_modules"]) > 1
        built = replace(built, adapter={**built.adapter, "target_modules": None})
        planned = replace(planned, adapter={**planned.adapter, "target_modules": None})
    assert planned == built
    assert (planned.critic, planned.training) == (critic, training)
    assert built.environment.startswith("StdlibSearchEnv(")
    assert built.rows == len(trainer.train_dataset)
    if not flags:  # nor do they expect it to take different memory
        run.on_cpu, run.prompt = True, setup_of(trainer).prompt
        there, planned_there = estimate(setup_of(trainer)), estimate(planned_setup(run))
        assert (there.peak, there.phase) == (planned_there.peak, planned_there.phase)
