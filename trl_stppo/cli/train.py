"""Train an agent.

With one of the variants of PPO and GRPO, over several turns in an environment. Settings of the model
(TRL's ModelConfig: --model_name_or_path, --lora_r, ...) and of the trainer (STPPOConfig, which is TRL's
GRPOConfig and more: --variant, --output_dir, --max_turns, ...) are flags too: --help_all lists them. A flag
beats the YAML file. Flags of `accelerate launch` (--num_processes, ...) start several processes. --dry_run
checks and shows all settings without loading weights.

Examples:
    trl-stppo train --config run.yaml --dry_run           # check it, and see what it takes
    trl-stppo train --config run.yaml --variant ppo --output_dir runs/ppo
    trl-stppo train --config run.yaml --accelerate_config zero2 --num_processes 4
    trl-stppo train --config run.yaml --resume_from_checkpoint auto
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import ModelConfig, get_peft_config, get_quantization_config

from ..redaction import redacted_words
from ..watch.curves import draw_curves
from ..watch.lines import say
from .agent_models import (
    TokenCounter,
    check_policy,
    check_value_model,
    load_value_model,
    model_options,
)
from .agents import (
    check_splits,
    drawn,
    load_environment,
    load_eval_environment,
    load_rewards,
    load_splits,
    parse_flags,
)
from .arguments import TrainArguments
from .early import wants_dry_run
from .evaluation_tables import figures_of, print_tables


def make_trainer(
    args: TrainArguments, training_args: Any, model_args: ModelConfig, trainer_class: type
) -> Any:
    """The trainer that the flags describe."""
    check_policy(model_args)
    check_value_model(args, training_args, model_args, trainer_class)
    train, held_out = load_splits(args)
    check_splits(args, training_args, train, held_out)
    train.info.dataset_name = args.rows_name  # metrics.jsonl names it
    if held_out is not None and args.eval_episodes:
        held_out = drawn(held_out, args.eval_episodes)
        held_out.info.dataset_name = args.rows_name  # the card asks whose they are
    training_args.model_init_kwargs = model_options(model_args, training_args.model_init_kwargs)
    counter = TokenCounter(model_args.model_name_or_path, model_args.model_revision)
    value_model = load_value_model(args, training_args, model_args)
    return trainer_class(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=load_rewards(args) or None,
        train_dataset=train,
        eval_dataset=held_out,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        environment_factory=load_environment(args, counter),
        eval_environment_factory=load_eval_environment(args, counter),
        **({} if value_model is None else {"value_model": value_model}),
    )


class FirstEvaluation(TrainerCallback):
    """Has a run begin with an evaluation, which its log keeps at step 0; what is resumed has it there."""

    def __init__(self, episodes: int) -> None:
        self._episodes = episodes

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Upstream looks at the argument next."""
        args.eval_on_start = state.global_step == 0
        if args.eval_on_start and state.is_world_process_zero:
            say(f"evaluating {self._episodes} held-out rows before training ...")


def train(
    args: TrainArguments,
    training_args: Any,
    model_args: ModelConfig,
    trainer_class: type,
    words: Sequence[str] = (),
) -> int:
    """Train, with the evaluations that the flags ask for around it; the exit code.

    Args:
        args: of the task.
        training_args: of the trainer.
        model_args: of the model.
        trainer_class: of the variant.
        words: the command line that they are from, to be repeated at the end.
    """
    if args.dry_run:
        raise ValueError(
            "`dry_run=True` was to look only; `run` does that, and nothing is trained."
        )
    disable_progress_bar()  # of loading; what is trained prints lines
    trainer = make_trainer(args, training_args, model_args, trainer_class)
    output_dir = Path(training_args.output_dir)
    if args.eval_episodes:
        trainer.add_callback(FirstEvaluation(min(args.eval_episodes, len(trainer.eval_dataset))))
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    if trainer.stop_signal:  # there is a checkpoint; whoever sent it wants the machine
        return 128 + trainer.stop_signal
    found = {}
    if args.eval_episodes:
        history = trainer.state.log_history
        before = [e for e in history if e.get("step") == 0 and "eval_runtime" in e]
        found = {"before": before[0]} if before else {}
        if trainer.accelerator.is_main_process:
            say("evaluating the trained agent ...")
        found["after"] = trainer.evaluate()
    # A push saves it once more, and uploads what is written in between.
    trainer.save_model(_internal_call=training_args.push_to_hub)
    if trainer.accelerator.is_main_process:
        trainer.state.save_to_json(str(output_dir / "trainer_state.json"))
        if found:
            (output_dir / "evaluation.json").write_text(json.dumps(found))
            parts = {name: figures_of(part, prefix="eval_") for name, part in found.items()}
            print_tables({"Held-out rows": parts})
        print(f"model: {output_dir}\ncurves: {drawn_curves(trainer)}")
        rows = args.eval_episodes and len(trainer.eval_dataset)
        steps = next_steps(trainer, words, str(model_args.model_name_or_path), rows)
        print("\n".join(steps))
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=args.dataset_name)
    return 0


def next_steps(trainer: Any, words: Sequence[str], base: str, rows: int = 0) -> list[str]:
    """Commands to look at the run with, as they can be typed here, under a heading.

    What is evaluated is what the run itself has seen: so many of the held-out rows, 0 for all, and with as
    many threads, of which a small model gets slower.
    """
    run, program, heading = shlex.quote(_short(Path(trainer.args.output_dir))), "trl-stppo", "next:"
    if shutil.which(program) is None:
        python = Path(sys.executable)
        if all(python.with_name(name).is_file() for name in ("activate", program)):
            heading = f"next, after `source {shlex.quote(_short(python.with_name('activate')))}`:"
        else:
            program = f"{shlex.quote(_short(python))} -m trl_stppo"
    said = [f"trace {run} --open"] if trainer.args.trace_episodes else []
    said.append(f"plot {run}")
    if words and trainer.eval_dataset is not None:  # the task as it was given, flags included
        models = f"{shlex.quote(base)} {run}"
        most = f" --max_rows {rows}" if rows else ""
        said.append(f"evaluate {shlex.join(redacted_words(words))}{most} --models {models}")
    threads = os.environ.get("OMP_NUM_THREADS")
    commands = [f"  {program} {command}" for command in said]
    return [heading, *([f"  export OMP_NUM_THREADS={threads}"] if threads else []), *commands]


def _short(path: Path) -> str:
    """From the current folder where the path leads into it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def drawn_curves(trainer: Any) -> str:
    """Where the picture of the run is, or why there is none."""
    path = Path(trainer.args.output_dir) / "curves.png"
    try:
        return str(draw_curves({trainer.args.variant: trainer.state.log_history}, path))
    except (ImportError, ValueError) as error:  # no matplotlib, or nothing was measured
        return f"none, {error}"


def run(words: list[str]) -> int:
    """Train, or only look; the exit code."""
    if wants_dry_run(words):
        from .dry_run import dry_run

        return dry_run(words)
    return train(*parse_flags(TrainArguments, words), words)
