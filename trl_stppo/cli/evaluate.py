"""Compare agents on held-out rows.

Plays every held-out row once per agent and prints success with its interval, per data set and averaged,
agents side by side. Flags and files are those of `train`, of which the task, the limits of an episode and
the eval_* settings count; --help_all lists them. An agent is a checkpoint, a model of the Hub or the folder
of an adapter. It takes the memory of its weights and of its rollout: no critic, reference or optimizer is
loaded.

Examples:
    trl-stppo evaluate --config run.yaml --models runs/agent
    trl-stppo evaluate --config run.yaml --models base runs/ppo --output runs/table
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM
from trl import ModelConfig, get_peft_config, get_quantization_config

from ..hub.loading import adapter_base, load_tokenizer
from ..redaction import redacted
from ..watch.lines import ProgressLines
from .agent_models import (
    TokenCounter,
    found_agent,
    model_options,
    unused_critic,
)
from .agents import (
    drawn,
    load_environment,
    load_eval_environment,
    load_splits,
    parse_flags,
)
from .arguments import EvaluateArguments
from .evaluation_tables import (
    Figures,
    Results,
    figures_of,
    print_tables,
    with_averages,
    write_files,
)
from .names import check_name
from .objects import load_object, offered_by
from .usage import UsageError

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# Settings that only training needs, and what switches them off.
LIGHT: dict[str, Any] = {
    **{"kl_coef": 0.0, "beta": 0.0, "value_model_name_or_path": None, "critic_lora_r": None},
    **{"gradient_checkpointing": False, "sync_ref_model": False, "rollout_staleness": 0},
    **{"save_strategy": "no", "eval_strategy": "no", "load_best_model_at_end": False},
    **{"push_to_hub": False, "report_to": [], "disable_tqdm": True},
    "trace_episodes": 0,
}


def agents_of(args: EvaluateArguments, model_args: ModelConfig) -> dict[str, str]:
    """Label -> agent."""
    models = args.models or [model_args.model_name_or_path]
    if models == [None]:
        raise UsageError("No agent is named. Set models, or model_name_or_path.")
    labels = args.labels or [Path(name).name or name for name in models]
    if args.labels is None and len(set(labels)) < len(models):
        labels = list(models)
    if len(labels) != len(models) or len(set(labels)) < len(labels):
        raise UsageError(
            f"`labels={labels}` for {len(models)} models: there must be as many, all different."
        )
    return dict(zip(labels, models, strict=True))


def check_agent(name: str, flag: str, model_args: ModelConfig, trust: bool) -> None:
    """Refuse an agent that cannot be loaded, before hours have been spent on others.

    Args:
        name: of the agent.
        flag: that has named it.
        model_args: flags of models.
        trust: `trust_remote_code`.
    """
    base = adapter_base(name)
    folder = Path(name)
    if folder.is_dir() and base is None and not any(any(folder.glob(w)) for w in WEIGHTS):
        raise FileNotFoundError(
            f"`{flag}`: {name} holds neither weights ({' or '.join(WEIGHTS)}) nor an adapter. Name the "
            f"folder of a saved model, or a checkpoint-<step> in it."
        )
    try:
        revision = revision_of(name, model_args)
        load_tokenizer(name, revision, trust_remote_code=trust)
        AutoConfig.from_pretrained(base or name, revision=revision, trust_remote_code=trust)
    except Exception as error:
        raise FileNotFoundError(f"`{flag}`: {name} cannot be loaded: {error}") from error


def revision_of(name: str, model_args: ModelConfig) -> str | None:
    """The Hub's, of an agent that is not on this machine."""
    return None if adapter_base(name) or Path(name).exists() else model_args.model_revision


def held_out_sets(args: EvaluateArguments) -> dict[str, Dataset]:
    """Held-out rows by data set: the column `dataset`, or all in one where there is none."""
    rows = load_splits(args)[1]
    if rows is None:
        raise UsageError(
            f"`dataset_name={args.dataset_name}` has no split {args.dataset_test_split!r} to evaluate on. "
            f"Set dataset_test_split to one that it has (a file of rows is the split 'train'), or name a "
            f"folder with train.jsonl and test.jsonl."
        )
    if args.dataset_streaming:
        rows = Dataset.from_list(list(rows))  # all of them are played anyway
    parts = {Path(str(args.dataset_name)).name: rows}
    if "dataset" in rows.column_names:
        names = rows["dataset"]
        where: dict[str, list[int]] = {}
        for index, name in enumerate(names):
            where.setdefault(str(name), []).append(index)
        parts = {name: rows.select(indices) for name, indices in where.items()}
    if args.max_rows is None:
        return parts
    if args.max_rows < 1:
        raise UsageError(f"`max_rows={args.max_rows}`: must satisfy max_rows >= 1 or None.")
    return {name: drawn(part, args.max_rows) for name, part in parts.items()}


def reported_functions(args: EvaluateArguments) -> list[str]:
    """Reward functions besides those that make the score."""
    wanted = args.figures
    if wanted is None:
        offers = offered_by(args.eval_environment or args.environment, "figures") or []
        wanted = [f"{function.__module__}:{function.__qualname__}" for function in offers]
    return [path for path in wanted if path not in ("none", *(args.reward_funcs or []))]


def titles_of(args: EvaluateArguments) -> dict[str, str]:
    """Reward function -> its column: its attribute `title`, or its name."""
    paths = [*(args.reward_funcs or []), *reported_functions(args)]
    names = {path: path.partition(":")[2] for path in paths}
    return {name: getattr(load_object(path), "title", name) for path, name in names.items()}


def light(config: Any, rewards: int, reported: int) -> Any:
    """A copy of the configuration that asks for nothing that only training needs."""
    config = copy.deepcopy(config)
    for name, value in LIGHT.items():
        if hasattr(config, name):
            setattr(config, name, value)
    config.num_generations_eval = config.num_generations_eval or 1
    config.reward_weights = [*(config.reward_weights or [1.0] * rewards), *[0.0] * reported]
    return config


def load_policy(name: str, config: Any, model_args: ModelConfig) -> tuple[Any, Any]:
    """The agent as the trainer takes it, and the configuration of an adapter it needs.

    Weights in 4 or 8 bits are taken with an adapter only, so that an agent without one is given one
    that does nothing yet.
    """
    base, quantised = adapter_base(name), get_quantization_config(model_args)
    if base is None:
        if quantised is None:
            return name, None
        targets = model_args.lora_target_modules or "all-linear"
        return name, get_peft_config(
            dataclasses.replace(model_args, use_peft=True, lora_target_modules=targets)
        )
    from peft import PeftModel

    options = {"trust_remote_code": config.trust_remote_code, **config.model_init_kwargs}
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=quantised, **options)
    return PeftModel.from_pretrained(model, name, is_trainable=True), None


def make_evaluator(
    name: str,
    args: EvaluateArguments,
    config: Any,
    model_args: ModelConfig,
    trainer_class: Any,
    rows: Dataset,
) -> Any:
    """A trainer that is only asked to evaluate."""
    reported = reported_functions(args)
    functions = [load_object(path) for path in (*(args.reward_funcs or []), *reported)]
    config = light(config, len(args.reward_funcs or []), len(reported))
    config.model_init_kwargs = model_options(model_args, config.model_init_kwargs)
    revision = revision_of(name, model_args)
    tokenizer = load_tokenizer(name, revision, trust_remote_code=config.trust_remote_code)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    counter = TokenCounter(name, revision)
    policy, adapter = load_policy(name, config, model_args)
    if not isinstance(policy, str):
        config.model_init_kwargs = None  # it is loaded already
    # Nothing is trained on; a rollout batch of rows is asked for all the same.
    filler = rows.select([i % len(rows) for i in range(config.generation_batch_size)])
    trainer = trainer_class(
        model=policy,
        args=config,
        reward_funcs=functions or None,
        train_dataset=filler,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args) if policy is name else None,
        peft_config=adapter,
        environment_factory=load_eval_environment(args, counter) or load_environment(args, counter),
        **({"value_model": unused_critic()} if trainer_class.has_critic else {}),
    )
    trainer.remove_callback(ProgressLines)  # all agents are in one table
    return trainer


def evaluate(
    name: str,
    args: EvaluateArguments,
    config: Any,
    model_args: ModelConfig,
    trainer_class: Any,
    sets: dict[str, Dataset],
) -> tuple[dict[str, Figures], bool]:
    """Figures of one agent by data set, and whether this process is the one that prints."""
    first = next(iter(sets.values()))
    trainer = make_evaluator(name, args, config, model_args, trainer_class, first)
    titles = titles_of(args)
    parts = {}
    for number, (data, rows) in enumerate(sets.items()):
        prefix = f"eval_{number}"
        metrics = trainer.evaluate(rows, metric_key_prefix=prefix)
        parts[data] = figures_of(metrics, prefix, titles)
    return with_averages(parts), trainer.accelerator.is_main_process


def run(words: Sequence[str]) -> int:
    """Evaluate, print, write; the exit code."""
    compare(words)
    return 0


def compare(words: Sequence[str]) -> Results:
    """Evaluate, print, write; the figures by agent and data set."""
    args, config, model_args, trainer_class = parse_flags(EvaluateArguments, words)
    agents, flag = agents_of(args, model_args), "models" if args.models else "model_name_or_path"
    for name in agents.values():
        check_name(flag, name)
    sets = held_out_sets(args)
    found = {label: found_agent(name, model_args) for label, name in agents.items()}
    for where, its_args in found.values():
        check_agent(where, flag, its_args, config.trust_remote_code)
    results: Results = {}
    is_main, written = True, []
    try:
        for label, (where, its_args) in found.items():
            results[label], is_main = evaluate(where, args, config, its_args, trainer_class, sets)
            gc.collect()  # trainers refer to themselves
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if is_main and args.output is not None:
                written = write_files(Path(args.output), results, settings_of(args, config, agents))
    finally:  # what there is of a run that fails half-way
        if is_main and results:
            print_tables(results)
            print("\n".join(f"written: {path}" for path in written))
    return results


def settings_of(args: EvaluateArguments, config: Any, agents: dict[str, str]) -> dict[str, Any]:
    """What the figures depend on besides the agents' weights."""
    names = (
        *("seed", "temperature", "top_p", "top_k", "eval_temperature", "eval_top_p", "eval_top_k"),
        *("max_turns", "max_turn_tokens", "max_completion_length"),
        *("eval_max_completion_length", "bf16"),
    )
    task = (
        *("dataset_name", "dataset_config", "dataset_test_split", "max_rows", "reward_funcs"),
        *("environment", "environment_kwargs", "eval_environment", "eval_environment_kwargs"),
    )
    found = {
        "agents": agents,
        **{name: getattr(args, name) for name in task},
        **{name: getattr(config, name) for name in names},
        "num_generations_eval": config.num_generations_eval or 1,
    }
    return redacted(found)
