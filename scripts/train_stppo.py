"""Train a language-model agent with ST-PPO on any model, dataset and environment.

    accelerate launch scripts/train_stppo.py --config scripts/configs/demo.yaml
    python scripts/train_stppo.py --config scripts/configs/demo.yaml --variant ppo --seed 1

Flags and YAML are read by TRL's TrlParser: STPPOConfig (hence GRPOConfig), ModelConfig and
ScriptArguments, plus the few below. A flag beats the YAML file.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
# Notes of our dependencies to each other, about which the reader of this output can do nothing.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

from datasets import Dataset, DatasetDict, load_dataset
from transformers.utils.logging import disable_progress_bar
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

from reporting import ProgressLines, comparison_table, plot_curves
from trl_stppo import STPPOConfig, STPPOTrainer

STDLIB_SEARCH = "stdlib-search"


@dataclass
class AgentArguments(ScriptArguments):
    """What to train on, and how to look at it.

    Parameters:
        environment (`str`, *optional*): `module:factory` of an environment (tools or text).
        environment_kwargs (`str`, *optional*): JSON object of arguments for the factory.
        reward_funcs (`list[str]`, *optional*): `module:function` of reward functions.
        eval_episodes (`int`): held-out rows to evaluate on, before and after; 0 for none. How they
            are sampled is in STPPOConfig's `eval_temperature` and its like.
        eval_environment, eval_environment_kwargs (`str`, *optional*): likewise, of evaluation; where
            neither is set, those of training.
        live_lines (`bool`): one short line per logging step instead of TRL's dictionaries.
    """

    dataset_name: str | None = field(
        default=STDLIB_SEARCH, metadata={"help": "Or a Hub id, or a path."}
    )
    environment: str | None = field(
        default="trl_stppo.envs:SearchEnv", metadata={"help": "module:factory; 'none' for none."}
    )
    environment_kwargs: str | None = field(
        default=None, metadata={"help": "JSON object of arguments for the environment's factory."}
    )
    reward_funcs: list[str] | None = field(default=None, metadata={"help": "module:function ..."})
    eval_episodes: int = field(default=0, metadata={"help": "Held-out episodes before and after."})
    eval_environment: str | None = field(
        default=None, metadata={"help": "module:factory of evaluation; default environment."}
    )
    eval_environment_kwargs: str | None = field(
        default=None, metadata={"help": "JSON object of arguments for eval_environment."}
    )
    live_lines: bool = field(default=True, metadata={"help": "One short line per logging step."})


def load_object(path: str) -> Any:
    """The object behind `module:name`."""
    module, _, name = path.partition(":")
    if not name:
        raise ValueError(f"`{path}` does not name an object; write it as module:name.")
    return getattr(importlib.import_module(module), name)


def load_environment(args: AgentArguments) -> Callable[[], Any] | None:
    """The environment factory that the flags name, with its arguments bound."""
    return factory_of(args.environment, args.environment_kwargs)


def load_eval_environment(args: AgentArguments) -> Callable[[], Any] | None:
    """The one of evaluation; None for that of training."""
    path, arguments = args.eval_environment, args.eval_environment_kwargs
    if path is None and arguments is None:
        return None
    return factory_of(args.environment if path is None else path, arguments)


def factory_of(path: str | None, arguments: str | None) -> Callable[[], Any] | None:
    """The factory `module:factory`, with arguments bound that are written as a JSON object."""
    if path in (None, "none"):
        return None
    factory = load_object(str(path))
    return factory if arguments is None else functools.partial(factory, **json.loads(arguments))


def load_splits(args: AgentArguments) -> tuple[Dataset, Dataset | None]:
    """Training rows, and held-out rows where the dataset has them."""
    if args.dataset_name == STDLIB_SEARCH:
        from trl_stppo.envs.stdlib_docs import stdlib_search_dataset

        return stdlib_search_dataset("train"), stdlib_search_dataset("test")
    loaded = load_dataset(args.dataset_name, args.dataset_config)
    if not isinstance(loaded, DatasetDict):
        return loaded, None
    return loaded[args.dataset_train_split], loaded.get(args.dataset_test_split)


def make_trainer(
    args: AgentArguments, training_args: STPPOConfig, model_args: ModelConfig
) -> STPPOTrainer:
    """The trainer that the flags describe."""
    train, held_out = load_splits(args)
    if held_out is not None and args.eval_episodes:
        held_out = held_out.shuffle(seed=0).select(range(min(args.eval_episodes, len(held_out))))
    init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    training_args.model_init_kwargs = {k: v for k, v in init_kwargs.items() if v is not None}
    return STPPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=[load_object(path) for path in args.reward_funcs or []] or None,
        train_dataset=train,
        eval_dataset=held_out,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        environment_factory=load_environment(args),
        eval_environment_factory=load_eval_environment(args),
    )


def main(args: AgentArguments, training_args: STPPOConfig, model_args: ModelConfig) -> None:
    if args.live_lines:
        disable_progress_bar()
    trainer = make_trainer(args, training_args, model_args)
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


if __name__ == "__main__":
    parser = TrlParser((AgentArguments, STPPOConfig, ModelConfig))
    main(*parser.parse_args_and_config())
