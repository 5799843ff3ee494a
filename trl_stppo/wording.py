"""Wrong names of settings: what they are closest to, and what they are called today."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

# Names of TRL's former PPOTrainer, of older transformers, of other frameworks, and short ones that
# people try -> ours. What PPOConfig takes as an alias is not here.
RENAMED = {
    "ppo_epochs": "num_ppo_epochs",
    "steps": "total_episodes",
    "init_kl_coef": "kl_coef",
    "kl_penalty": "kl_estimator",
    "early_stopping": "target_kl",
    "query_dataset": "dataset_name",
    "reward_model": "reward_funcs",
    "log_with": "report_to",
    "exp_name": "run_name",
    "model_name": "model_name_or_path",
    "max_new_tokens": "max_completion_length",
    "max_response_length": "max_completion_length",
    "clip_ratio": "cliprange",
    "kl_loss_coef": "beta",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "torch_dtype": "dtype",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "warmup_ratio": "warmup_steps",
    "model": "model_name_or_path",
    "value_model": "value_model_name_or_path",
    "critic": "value_model_name_or_path",
    "dataset": "dataset_name",
    "env": "environment",
    "env_kwargs": "environment_kwargs",
    "reward_func": "reward_funcs",
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "resume": "resume_from_checkpoint",
    "lora_rank": "lora_r",
    "qlora": "load_in_4bit",
    "lora": "use_peft",
}
BATCHES = (
    "it follows from per_device_train_batch_size, gradient_accumulation_steps and num_mini_batches; "
    "set those"
)
LINES = (
    "a start line, one line per rollout batch and one per evaluation are always printed, in place of a "
    "progress bar and dictionaries; leave it out (curves: report_to)"
)
# Names that have no successor -> what to do.
GONE = {
    **dict.fromkeys(
        ("batch_size", "mini_batch_size", "micro_batch_size", "train_batch_size"), BATCHES
    ),
    **dict.fromkeys(("local_batch_size", "local_mini_batch_size", "num_total_batches"), BATCHES),
    **dict.fromkeys(("live_view", "live_lines"), LINES),
    "ppo_mini_batch_size": BATCHES,
    "world_size": "the launcher says it: --num_processes",
    "max_prompt_length": "prompts are not cut; filter the rows, and leave it out",
    "overwrite_output_dir": "resume_from_checkpoint says whether a run goes on; leave it out",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR, and leave it out",
}


def closest(word: str, known: Iterable[str], number: int = 3) -> list[str]:
    """The most similar of some names, the best first; none where nothing is similar."""
    return difflib.get_close_matches(word, list(known), n=number, cutoff=0.6)


def named(words: Iterable[str]) -> str:
    """`a`, `b` or `c`."""
    *others, last = [f"`{word}`" for word in words]
    return f"{', '.join(others)} or {last}" if others else last


def proposal(name: str, known: Collection[str], dashes: str = "") -> str | None:
    """What to write instead of a name that is not known; None where nothing is like it.

    Args:
        name: without dashes.
        known: the names that there are.
        dashes: before a name that is proposed, as flags have them.
    """
    if RENAMED.get(name) in known:
        return f"It is called `{dashes}{RENAMED[name]}` here."
    if name in GONE:
        return f"There is none here: {GONE[name]}."
    similar = closest(name, known)
    return f"Did you mean {named(dashes + word for word in similar)}?" if similar else None
