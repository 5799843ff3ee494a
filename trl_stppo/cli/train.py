"""Train an agent.

Trains with a variant of PPO or GRPO, over several turns in an environment.
A setting is a flag or a key of the YAML file; a flag overrides the file.
`accelerate launch -m trl_stppo train` starts several processes. The usual
settings stand at the head of docs/configuration.md.

Examples:
    trl-stppo train --config run.yaml --dry_run # check it, and see its batches
    trl-stppo train --config run.yaml --variant ppo --output_dir runs/ppo
    trl-stppo train --config run.yaml --resume_from_checkpoint auto
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from transformers import TrainerCallback, TrainerState
from transformers.utils.logging import disable_progress_bar
from trl import ModelConfig, get_peft_config, get_quantization_config

from ..trainer.ppo_config import PPOConfig
from ..trainer.ppo_trainer import PPOTrainer
from ..watch.lines import say
from . import agents
from .evaluation_tables import figures_of, print_table
from .flags import TrainArguments
from .usage import UsageError


def make_trainer(
    args: TrainArguments,
    training_args: PPOConfig,
    model_args: ModelConfig,
    trainer_class: type[PPOTrainer],
) -> PPOTrainer:
    """Make the trainer that the flags describe."""
    critic = args.value_model_name_or_path
    agents.check_models(model_args, critic, trainer_class.has_critic)
    train, held_out = agents.load_splits(args)
    agents.check_splits(args, training_args, train, held_out)
    train.info.dataset_name = args.rows_name
    if held_out is not None and args.eval_episodes:
        held_out = agents.drawn(held_out, args.eval_episodes)
        held_out.info.dataset_name = args.rows_name
    training_args.model_init_kwargs = agents.model_options(model_args, training_args.model_init_kwargs)
    counter = agents.token_counter(model_args.model_name_or_path, model_args.model_revision)
    return trainer_class(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=agents.load_rewards(args) or None,
        train_dataset=train,
        eval_dataset=held_out,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        value_model=critic,
        environment_factory=agents.load_environment(args, counter),
        agent=agents.load_agent(args),
    )


class FirstEvaluation(TrainerCallback):
    """Callback that evaluates before the first optimizer step. A resumed run skips the evaluation."""

    def __init__(self, episodes: int) -> None:
        self._episodes = episodes

    def on_train_begin(self, args: PPOConfig, state: TrainerState, control: object, **kwargs: object) -> None:
        """Set `eval_on_start` for a new run. transformers reads this setting after the callback."""
        args.eval_on_start = state.global_step == 0
        if args.eval_on_start and state.is_world_process_zero:
            say(f"evaluating {self._episodes} rows before training ...")


def train(
    args: TrainArguments,
    training_args: PPOConfig,
    model_args: ModelConfig,
    trainer_class: type[PPOTrainer],
) -> int:
    """Train, evaluate before and after if `eval_episodes` is set, and return the exit code."""
    disable_progress_bar()
    trainer = make_trainer(args, training_args, model_args, trainer_class)
    output_dir = Path(training_args.output_dir)
    if args.eval_episodes:
        trainer.add_callback(FirstEvaluation(min(args.eval_episodes, len(trainer.eval_dataset))))
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    if trainer.stop_signal:
        return 128 + trainer.stop_signal
    found = {}
    if args.eval_episodes:
        history = trainer.state.log_history
        before = [e for e in history if e.get("step") == 0 and "eval_runtime" in e]
        found = {"before": before[0]} if before else {}
        if trainer.accelerator.is_main_process:
            say("evaluating the trained agent ...")
        found["after"] = trainer.evaluate()
    # Do not push yet, because the push below saves the model again and uploads the files written until then.
    trainer.save_model(_internal_call=training_args.push_to_hub)
    if trainer.accelerator.is_main_process:
        trainer.state.save_to_json(str(output_dir / "trainer_state.json"))
        if found:
            (output_dir / "evaluation.json").write_text(json.dumps(found))
            parts = {name: figures_of(part, prefix="eval_") for name, part in found.items()}
            title = f"rows of the split {args.dataset_test_split!r}"
            print_table({name: {title: figures} for name, figures in parts.items()})
        print(f"model: {output_dir}")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=args.dataset_name)
    return 0


def run(words: Sequence[str]) -> int:
    """Parse the flags and train; return the exit code."""
    parsed = agents.parse_flags(TrainArguments, words)
    if parsed[1].n_gpu > 1:
        raise UsageError(
            f"{parsed[1].n_gpu} GPUs are visible, and one process trains on one. Choose it with "
            "CUDA_VISIBLE_DEVICES=0, or run `accelerate launch -m trl_stppo train ...`."
        )
    return train(*parsed)
