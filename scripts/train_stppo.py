"""Train a language-model agent with ST-PPO on any model, dataset and environment.

    accelerate launch scripts/train_stppo.py --config scripts/configs/demo.yaml
    python scripts/train_stppo.py --config scripts/configs/demo.yaml --variant ppo --seed 1
    python scripts/train_stppo.py --config my_run.yaml --dry_run --dry_run_processes 8

Flags and YAML are read by TRL's TrlParser: STPPOConfig (STGRPOConfig for the variants without a
critic; both extend GRPOConfig), ModelConfig and ScriptArguments, plus the few below. A flag beats the
YAML file. `--dry_run` checks and shows all of it, and loads no weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from early import quieten, wants_dry_run

quieten()

from transformers.utils.logging import disable_progress_bar
from trl import ModelConfig, get_peft_config, get_quantization_config

from agent_models import TokenCounter, load_value_model, model_options
from agents import (
    TrainArguments,
    drawn,
    load_environment,
    load_eval_environment,
    load_object,
    load_splits,
    parse_flags,
)
from reporting import ProgressLines, comparison_table, plot_curves


def make_trainer(
    args: TrainArguments, training_args: Any, model_args: ModelConfig, trainer_class: type
) -> Any:
    """The trainer that the flags describe."""
    train, held_out = load_splits(args)
    if held_out is not None and args.eval_episodes:
        held_out = drawn(held_out, args.eval_episodes)
    training_args.model_init_kwargs = model_options(model_args, training_args.model_init_kwargs)
    counter = TokenCounter(model_args.model_name_or_path, model_args.model_revision)
    value_model = load_value_model(args, training_args, model_args, trainer_class)
    return trainer_class(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=[load_object(path) for path in args.reward_funcs or []] or None,
        train_dataset=train,
        eval_dataset=held_out,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        environment_factory=load_environment(args, counter),
        eval_environment_factory=load_eval_environment(args, counter),
        **({} if value_model is None else {"value_model": value_model}),
    )


def main(
    args: TrainArguments, training_args: Any, model_args: ModelConfig, trainer_class: type
) -> None:
    """Train, with the evaluations that the flags ask for around it."""
    if args.dry_run:
        raise ValueError(
            "`dry_run=True` was to look only; `start` does that, and nothing is trained."
        )
    if args.live_lines:
        disable_progress_bar()
    trainer = make_trainer(args, training_args, model_args, trainer_class)
    output_dir = Path(training_args.output_dir)
    lines = ProgressLines(trainer) if args.live_lines else None
    before = trainer.evaluate() if args.eval_episodes else {}
    if lines:
        lines.start(before)
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    if trainer.stop_signal:  # there is a checkpoint; whoever sent it wants the machine
        sys.exit(128 + trainer.stop_signal)
    after = trainer.evaluate() if args.eval_episodes else {}
    trainer.save_model()
    if trainer.accelerator.is_main_process:
        if args.eval_episodes:
            comparison_table(before, after)
        figure = plot_curves(
            trainer.state.log_history, output_dir / "curves.png", training_args.variant
        )
        trainer.state.save_to_json(str(output_dir / "trainer_state.json"))
        (output_dir / "evaluation.json").write_text(json.dumps({"before": before, "after": after}))
        print(f"model: {output_dir}\ncurves: {figure}")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=args.dataset_name)


def start(words: list[str]) -> None:
    """Train, or only look."""
    if wants_dry_run(words):
        from dry_run import dry_run

        sys.exit(dry_run(words))
    main(*parse_flags(TrainArguments, words))


if __name__ == "__main__":
    start(sys.argv[1:])
