"""What a run of the studies trains on, and how its agent gets there from nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer

BATCH = 32  # demonstrations per step of the warm start


@dataclass(frozen=True)
class Task:
    """What a run trains on; `settings` are those of the trainer that belong to the task.

    Attributes:
        agent: folder of the policy.
        train: rows.
        test: held-out rows, all of which are played before and after.
        environment: factory.
        settings: of the trainer.
        episodes: per rollout batch.
        updates: rollout batches of a run.
    """

    agent: Path
    train: Dataset
    test: Dataset
    environment: Callable[[], Any]
    settings: dict[str, Any]
    episodes: int
    updates: int


def warm_start(
    folder: Path,
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    demonstrations: Sequence[list[dict[str, str]]],
    learning_rate: float = 3e-3,
    warmup_steps: int = 50,
) -> None:
    """Train an agent on demonstrations, one pass in this order.

    Nothing is written under the agent's name until it is ready.
    """
    staging = folder.with_name(folder.name + ".incomplete")
    config = SFTConfig(
        output_dir=str(staging),
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=warmup_steps,
        assistant_only_loss=True,
        train_sampling_strategy="sequential",
        gradient_checkpointing=False,  # TRL's own field, whatever transformers calls it
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=500,
    )
    data = Dataset.from_list([{"messages": messages} for messages in demonstrations])
    SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer).train()
    model.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    staging.rename(folder)
