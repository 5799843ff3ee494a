"""Compare agents on held-out rows.

Plays every held-out row once per agent and prints success with its interval,
per data set and their mean. It accepts the flags and files of `train`, and uses
the task, the limits of an episode and the eval_* settings. Critic, reference
and optimizer are not loaded. A reward function with weight 0 is reported and
does not count in the score.

Examples:
    trl-stppo evaluate --config run.yaml --models runs/agent
    trl-stppo evaluate --config run.yaml --models base runs/ppo --output a.json
"""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers.utils.logging import disable_progress_bar
from trl import ModelConfig, get_quantization_config

from ..agent import Agent
from ..generation.protocol import Backend
from ..hub.loading import policy_folder
from ..hub.settings import SAMPLING, AgentSettings
from ..paths import check_name
from ..rollout.reward_funcs import RewardFunc, name_of, numbered
from ..trainer.loop.rollout import Played, Scored
from ..trainer.planning.rewards import check_reward_weights
from ..trainer.play import Speaker
from ..trainer.ppo_config import PPOConfig
from ..trainer.recorder import row_pieces
from ..trainer.sharding.runtime import unpartitioned
from ..watch.lines import QUIET_SECONDS
from . import agents
from .evaluation_tables import (
    Figures,
    Outcomes,
    Results,
    figures_of,
    print_differences,
    print_table,
    with_mean,
)
from .flags import EvaluateArguments, given
from .objects import load_reward, offered_by
from .usage import UsageError

logger = logging.getLogger(__name__)

Wrapper = Callable[[Agent, str], Callable[[Backend], Backend]]
# Settings that affect the metrics.
RECORDED = ("seed", "eval_generation_kwargs", "bf16")
# Field of the configuration -> the agent's setting.
LIMITS = {
    **{name: name for name in ("max_turns", "max_turn_tokens", "max_images", "env_timeout_seconds")},
    "max_tool_calling_iterations": "max_tool_rounds",
}


def agents_of(args: EvaluateArguments, model_args: ModelConfig) -> dict[str, str]:
    """Return each agent's path or Hub id by its label in the table: its folder's name, if all differ."""
    models = args.models or [model_args.model_name_or_path]
    if models == [None]:
        raise UsageError("There is no agent: set models, or model_name_or_path.")
    labels = [Path(name).name or name for name in models]
    return dict(zip(labels if len({*labels}) == len(models) else models, models, strict=True))


def held_out_sets(args: EvaluateArguments) -> dict[str, Dataset]:
    """Split the held-out rows by their column `dataset`. Without this column all rows are one data set."""
    rows = agents.load_splits(args)[1]
    if rows is None:
        raise UsageError(
            f"`dataset_test_split={args.dataset_test_split!r}`: no such split; or set test_split_size."
        )
    if not hasattr(rows, "__len__"):
        # Load all rows of a stream, because all of them are played.
        rows = Dataset.from_list(list(rows))
    if args.dataset_test_split == args.dataset_train_split and not args.test_split_size:
        logger.warning("`dataset_test_split`: this split is also the split of training.")
    parts = {args.rows_name: rows}
    if "dataset" in rows.column_names:
        indices: dict[str, list[int]] = {}
        for index, name in enumerate(rows["dataset"]):
            indices.setdefault(str(name), []).append(index)
        parts = {name: rows.select(part) for name, part in indices.items()}
    if args.max_rows is None:
        return parts
    return {name: agents.drawn(part, args.max_rows) for name, part in parts.items()}


def reported_functions(args: EvaluateArguments, counting: Sequence[RewardFunc]) -> list[RewardFunc]:
    """Return the reward functions of the environment's `figures`, without those `counting` in the score."""
    offered = offered_by(args.environment, "figures") or []
    return [function for function in offered if function not in counting]


def chosen_settings(words: Sequence[str], config: PPOConfig) -> set[str]:
    """Return the names of an agent's settings that flags or the YAML file set."""
    names = (*LIMITS, *SAMPLING, "max_completion_length", "chat_template_kwargs")
    return {*given(words, names), *config.eval_settings, *(config.generation_kwargs or {})}


def settings_for(folder: Path, config: PPOConfig, chosen: set[str]) -> dict[str, Any]:
    """Return an agent's settings: `chosen` settings from flags, the others from `agent.json` if it exists."""
    # These settings apply only to sampled turns, so a greedy evaluation (temperature 0) adds none.
    sampling = {name: getattr(config, name) for name in SAMPLING} | (config.generation_kwargs or {})
    if config.eval_settings.get("temperature") != 0.0:
        sampling |= config.eval_settings
    length = config.eval_settings.get("max_completion_length", config.max_completion_length)
    settings: dict[str, Any] = {
        "max_completion_length": length,
        "chat_template_kwargs": config.chat_template_kwargs or {},
        "sampling": {name: sampling[name] for name in SAMPLING},
        **{setting: getattr(config, name) for name, setting in LIMITS.items()},
    }
    if (own := AgentSettings.load(folder)) is None:
        return settings
    names = {LIMITS.get(name, name) for name in chosen}
    kept = {n: v if n in names else getattr(own, n) for n, v in settings.items()}
    of_flags = {name: value for name, value in settings["sampling"].items() if name in chosen}
    return {**kept, "sampling": own.sampling | of_flags}


def load_agent(folder: Path, config: PPOConfig, model_args: ModelConfig, settings: dict[str, Any]) -> Agent:
    """Load an agent as a trainer with these flags would use it in evaluation."""
    # TRL loads models in float32.
    options = {"trust_remote_code": config.trust_remote_code, "dtype": "float32"}
    # Drop `model_revision`, because it is the agent's, and an adapter names its base model's revision.
    options |= agents.model_options(replace(model_args, model_revision=None), config.model_init_kwargs)
    if config.bf16_full_eval or config.fp16_full_eval:
        options["dtype"] = "bfloat16" if config.bf16_full_eval else "float16"
    with unpartitioned():
        agent = Agent.from_pretrained(
            str(folder),
            quantization_config=get_quantization_config(model_args) or False,
            device=config.device,
            model_init_kwargs=options,
            **settings,
        )
    model, ends = agent.model, []
    if config.stop_token_id is not None:
        ends = [*Speaker(model, agent.tokenizer).eos_token_ids, config.stop_token_id]
    # Use autocast, because accelerate does so for a trainer's model.
    if config.bf16:
        model.forward = torch.autocast(config.device.type, torch.bfloat16)(model.forward)
    limits = replace(agent.settings, eos_token_ids=ends)
    options = config.generation_kwargs
    return Agent(model, agent.processing_class, limits, generation_kwargs=options)


class Watch:
    """Prints an agent's first `left` episodes, and progress unless `total` is 0; collects all outcomes."""

    def __init__(self, left: int, total: int, agent: Agent, label: str) -> None:
        self._left, self._total, self._label = left, total, label
        self._tokenizer, self._reader = agent.tokenizer, agent.reader
        self._spoke = time.monotonic()
        self.outcomes: Outcomes = []

    def __call__(self, rollout: Played, scored: Scored) -> None:
        """Print episodes of a rollout: how each ended, and its tokens as text."""
        pairs = [*zip(rollout.episodes, scored.totals, strict=True)]
        self.outcomes += [(episode.success, score) for episode, score in pairs]
        played = len(self.outcomes)
        if time.monotonic() - self._spoke > QUIET_SECONDS and played < self._total:
            self._spoke = time.monotonic()
            print(f"{self._label}: {played} of {self._total} episodes", flush=True)
        told, self._left = pairs[: self._left], max(0, self._left - len(pairs))
        for episode, score in told:
            ending = f"{episode.stop_reason} after {episode.num_turns} turns, score {score:.3g}"
            success = {True: ", success", False: ", no success", None: ""}[episode.success]
            print(f"\n{self._label}: {ending}{success}")
            for context in episode.contexts:
                row = [*context.prompt_ids, *context.ids]
                images = context.images
                extents = self._reader.extents(row, images) if self._reader else []
                print("".join(row_pieces(self._tokenizer, row, images, extents)))


def evaluate(
    agent: Agent,
    folder: Path,
    args: EvaluateArguments,
    config: PPOConfig,
    sets: dict[str, Dataset],
    name: str,
    wrapper: Wrapper | None,
) -> tuple[dict[str, Figures], Outcomes]:
    """Evaluate the agent of `folder`. Return its metrics by data set, and this process's outcomes.

    `name` is the agent's Hub id or path as the user gave it; for `wrapper` see `compare`.
    """
    counter = agents.token_counter(folder)
    factory = agents.load_environment(args, counter)
    counting = [load_reward(path) for path in args.reward_funcs or []]
    reported = reported_functions(args, counting)
    functions = [*counting, *reported]
    weights = (config.reward_weights or [])[-len(counting) :] or [1.0] * len(counting)
    loop = agents.load_agent(args)
    if factory is None and loop is None and not functions:
        raise UsageError("No score: set `environment`, `agent` or `reward_funcs`.")
    size = config.per_device_eval_batch_size
    is_main, repetitions = config.process_index == 0, config.num_generations_eval or 1
    total = sum(map(len, sets.values())) * repetitions if config.world_size == 1 else 0
    watch = Watch(args.show * is_main, total, agent, name)
    metrics = agent.evaluate(
        factory,
        sets,
        functions,
        reward_weights=[*weights, *[0.0] * len(reported)],
        missing_eos_penalty=config.missing_eos_penalty,
        seed=config.seed,
        greedy=config.eval_settings.get("temperature") == 0.0,
        repetitions=repetitions,
        parallel=min(size, config.generation_slots or size),
        agent=loop,
        agent_endpoint=config.agent_endpoint,
        on_rollout=watch,
        wrap_backend=None if wrapper is None else wrapper(agent, name),
    )
    names = numbered([*map(name_of, functions)])
    titles = {n: getattr(each, "title", n) for n, each in zip(names, functions, strict=True)}
    figures = {data: figures_of(part, titles) for data, part in metrics.items()}
    return with_mean(figures), watch.outcomes


def run(words: Sequence[str]) -> int:
    """Compare the agents, print and write the results, and return the exit code."""
    # Otherwise loading a model shows progress bars.
    disable_progress_bar()
    compare(words)
    return 0


def compare(words: Sequence[str], wrapper: Wrapper | None = None) -> Results:
    """Evaluate all agents, print and write the results, and return the metrics by agent and data set.

    `wrapper` takes an agent and its name, and returns a function that wraps the backend of its turns.
    """
    args, config, model_args, _ = agents.parse_flags(EvaluateArguments, words)
    found, flag = agents_of(args, model_args), "models" if args.models else "model_name_or_path"
    for name in found.values():
        check_name(flag, name)
    judged = args.reward_model_name_or_path is not None
    check_reward_weights(config, judged + len(args.reward_funcs or []))
    # This command loads no reward model, so the score lacks its reward.
    if judged:
        logger.warning("`reward_model_name_or_path`: not evaluated here, so no part of the score.")
    sets = held_out_sets(args)
    trust, revision = config.trust_remote_code, model_args.model_revision
    folders = {k: policy_folder(name, revision, code=trust) for k, name in found.items()}
    chosen = chosen_settings(words, config)
    settings = {label: settings_for(folder, config, chosen) for label, folder in folders.items()}
    if any(each != next(iter(settings.values())) for each in settings.values()):
        logger.warning("The agents play with different limits or sampling, as their runs did: %s.", settings)
    results: Results = {}
    outcomes: dict[str, Outcomes] = {}
    is_main, repetitions = config.process_index == 0, config.num_generations_eval or 1
    try:
        for label, folder in folders.items():
            # Keep no reference to the agent, so that its memory is free for the next one.
            results[label], outcomes[label] = evaluate(
                load_agent(folder, config, model_args, settings[label]),
                *(folder, args, config, sets, found[label], wrapper),
            )
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    finally:
        # If an agent fails, write the results of the agents before it.
        if is_main and results:
            print_table(results)
            if args.output is not None:
                path = Path(args.output)
                path.parent.mkdir(parents=True, exist_ok=True)
                used = {name: getattr(config, name) for name in RECORDED}
                used |= {"num_generations_eval": repetitions, "agents": found, "limits": settings}
                about = {**vars(args), **used}
                written = {"settings": about, "results": results}
                path.write_text(json.dumps(written, indent=1) + "\n")
                print(f"written: {path}")
    if config.world_size == 1:
        print_differences(outcomes, repetitions)
    return results
