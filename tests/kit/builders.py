"""Builds a small trainer in one call: tiny models, the character tokenizer, quick settings."""

from collections.abc import Callable
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback

from tests.kit.fakes import CountEnv, char_tokenizer, tiny_policy
from tests.kit.surroundings import USE_CPU
from trl_stppo import PPOConfig, PPOTrainer, STGRPOTrainer, STPPOConfig, STPPOTrainer
from trl_stppo.trainer.training_loop import TrainingLoop

QUICK = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_mini_batches": 2,
    "num_ppo_epochs": 1, "max_steps": 2, "learning_rate": 5e-3, "critic_learning_rate": 1e-2,
    "max_completion_length": 12, "bf16": False, "gradient_checkpointing": False, "use_cpu": USE_CPU,
    "report_to": "none", "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip
CRITICS = "critic_learning_rate"
# A text environment, and settings that leave its episodes room for two turns.
TEXT = {"environment_factory": CountEnv}
LIMITS = {"max_turns": 3, "max_turn_tokens": 6, "max_completion_length": 60}


def quick_config(folder: Any, config: type[PPOConfig] = STPPOConfig, **options: Any) -> PPOConfig:
    """A configuration whose training takes a second."""
    quick = {k: v for k, v in QUICK.items() if config.trainer_name != "STGRPOTrainer" or k != CRITICS}
    return with_estimator(config, {"output_dir": str(folder), **quick, **options})


def with_estimator(config: type[PPOConfig], options: dict[str, Any]) -> PPOConfig:
    """A configuration; how it measures the clipping bias is no setting of it."""
    estimator = options.pop("clip_bias_estimator", None)
    args = config(**options)
    if estimator is not None:
        args.measures_clip_bias = True
        args.takes_second_gradient |= estimator == "exact"
    return args


def prompts(count: int = 8, **columns: Any) -> Dataset:
    """Rows with one user message each."""
    rows = [[{"role": "user", "content": f"say {i} "}] for i in range(count)]
    return Dataset.from_dict({"prompt": rows, **columns})


def share_of_a(completions: list[Any], **kwargs: Any) -> list[float]:
    """A reward function: how much of the completion is the letter a."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [text.count("a") / max(1, len(text)) for text in texts]


def build(
    folder: Any,
    trainer_class: type[PPOTrainer] = PPOTrainer,
    *,
    arguments: dict[str, Any] | None = None,
    **options: Any,
) -> PPOTrainer:
    """A trainer of tiny models.

    `arguments` are of the constructor, in place of or besides the defaults; `options` differ from QUICK.
    """
    tokenizer = char_tokenizer()
    defaults = {
        "model": tiny_policy(tokenizer),
        "train_dataset": prompts(),
        "processing_class": tokenizer,
        "args": quick_config(folder, trainer_class.config_class, **options),
    }
    arguments = {**defaults, **(arguments or {})}
    if not {"environment_factory", "rollout_func", "reward_model"} & set(arguments):
        arguments.setdefault("reward_funcs", share_of_a)
    return trainer_class(**arguments)


def train(*args: Any, **kwargs: Any) -> PPOTrainer:
    """Build a trainer and train it."""
    trainer = build(*args, **kwargs)
    trainer.train()
    return trainer


def at_step(event: str, step: int, do: Callable[[], object]) -> TrainerCallback:
    """A callback that does something at one event after so many steps."""

    def method(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == step:
            do()

    return type("AtStep", (TrainerCallback,), {event: method})()


def logs(trainer: PPOTrainer) -> dict[str, float]:
    """Every logged figure, the newest of each name."""
    return {name: value for entry in trainer.state.log_history for name, value in entry.items()}


class KeepingLoop(TrainingLoop):
    """Keeps each rollout, and mode, batch, turns, scores and targets of each."""

    def report(self, played, scored, estimates, data, seconds):
        host = self.host
        mode = "train" if host.model.training else "eval"
        kept = (mode, data, estimates.turns, scored.scores, estimates.targets)
        host.kept = [*getattr(host, "kept", []), kept]
        host.rollouts = [*getattr(host, "rollouts", []), played]
        host.scored = [*getattr(host, "scored", []), scored]
        super().report(played, scored, estimates, data, seconds)


class Keeps:
    """Keeps every rollout, its batch unshuffled, and what went into its advantages."""

    loop_class = KeepingLoop

    @property
    def episodes(self):
        """Of the newest rollout."""
        return self.rollouts[-1].episodes


class Kept(Keeps, STPPOTrainer):
    """With a critic."""


class KeptGroups(Keeps, STGRPOTrainer):
    """Without one."""
