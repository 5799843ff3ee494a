"""Wrong names of settings: what they are closest to, and what they are called today."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

# Names of older transformers, of other frameworks, and short ones that people try -> ours, where
# similarity would not lead there. What PPOConfig takes as an alias is not here.
RENAMED = {
    "max_new_tokens": "max_completion_length",
    "kl_loss_coef": "beta",
    "no_cuda": "use_cpu",
    "model": "model_name_or_path",
    "value_model": "value_model_name_or_path",
    "critic": "value_model_name_or_path",
    "env": "environment",
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
# Names that have no successor -> what to do.
GONE = {
    **dict.fromkeys(
        ("batch_size", "mini_batch_size", "micro_batch_size", "train_batch_size"), BATCHES
    ),
    **dict.fromkeys(("local_batch_size", "local_mini_batch_size", "num_total_batches"), BATCHES),
    "ppo_mini_batch_size": BATCHES,
    "world_size": "the launcher says it: --num_processes",
    "max_prompt_length": "prompts are not cut; filter the rows, and leave it out",
    "overwrite_output_dir": "resume_from_checkpoint says whether a run goes on; leave it out",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR, and leave it out",
}


def did_you_mean(word: str, known: Iterable[str], dashes: str = "") -> str | None:
    """The question for the most similar of some names, the best first; None where nothing is similar."""
    similar = difflib.get_close_matches(word, list(known))
    *others, last = [f"`{dashes}{name}`" for name in similar] or [""]
    return f"Did you mean {', '.join(others)}{' or ' if others else ''}{last}?" if last else None


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
    return did_you_mean(name, known, dashes)
