"""Tasks of the cells, and the teaching of their agents."""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from filelock import FileLock
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM

Row = dict[str, Any]
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """A task; a module of `tasks/` has one or more of them in its `TASKS`.

    Attributes:
        agent: the policy that a run begins with, a folder or a name of the Hub. Its arguments are the
            folder of everything that the studies make, the agent's number, and the steps of its teaching
            (None for all of them).
        rows: those of training; its arguments are that folder and how many rows are used (None for all).
        player: arguments of the trainer that play and reward episodes (`environment_factory`, `agent`,
            `tools`, `reward_funcs`), and `peft_config`.
        args: settings of the configuration; those that a trainer's configuration lacks are left out.
        critic: settings for trainers that have a critic.
        episodes: of a rollout batch.
        rollouts: number of rollout batches.
        mini_batches: optimizer steps per epoch over a rollout batch.
        group: episodes per prompt of trainers without a critic.
        measure: curve by which a run is judged, "success" or "reward".
        held_out: rows that are played before and after; None for none.
        agents: number of taught agents; a run with seed s begins with agent s modulo this number.
    """

    agent: Callable[[Path, int, int | None], str | Path]
    rows: Callable[[Path, int | None], list[Row]]
    player: dict[str, Any]
    args: dict[str, Any]
    critic: dict[str, Any] = field(default_factory=dict)
    episodes: int = 32
    rollouts: int = 20
    mini_batches: int = 4
    group: int = 4
    measure: str = "success"
    held_out: Callable[[Path, int | None], list[Row]] | None = None
    agents: int = 1

    def small(self) -> Task:
        """Return the same with two rollouts of 16 episodes, few rows, and an agent that is hardly taught."""
        rows, held_out, agent = self.rows, self.held_out, self.agent
        return replace(
            self,
            agent=lambda folder, number, steps: agent(folder, number, 10),
            rows=lambda folder, _: rows(folder, 16)[:16],
            held_out=held_out and (lambda folder, _: held_out(folder, 8)[:8]),
            episodes=16,
            rollouts=2,
        )


def load(name: str) -> Task:
    """Return the task of a name; the part before a hyphen is the name of its module.

    Raises:
        ValueError: there is no such task.
    """
    known: dict[str, Task] = {}
    for path in sorted((Path(__file__).parent / "tasks").glob("*.py")):
        if path.stem == name.split("-")[0]:
            known = importlib.import_module(f"tasks.{path.stem}").TASKS
    if name not in known:
        raise ValueError(f"task {name!r}: allowed are {', '.join(known) or 'the modules of tasks/'}.")
    return known[name]


def made(folder: Path, make: Callable[[Path], None]) -> Path:
    """Make a folder unless it is there. One process makes it, and it has its name once it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            staging = folder.with_name(folder.name + ".incomplete")
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            make(staging)
            staging.rename(folder)
    return folder


def taught(name: str, teach: Callable[..., tuple[Any, Any]], steps: int) -> Callable[..., Path]:
    """Return a task's `agent`.

    Args:
        name: of the agents' folders.
        teach: makes an agent: `teach(number, steps)` returns model and tokenizer.
        steps: of a whole teaching.
    """

    def agent(folder: Path, number: int, short: int | None) -> Path:
        def make(target: Path) -> None:
            for part in teach(number, short or steps):
                part.save_pretrained(target)

        mark = "" if short is None else f"-{short}"
        return made(folder / f"{name}-agent-{number}{mark}", make)

    return agent


def imitate(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    batches: Iterable[Sequence[Messages]],
    rates: Iterable[float],
) -> None:
    """Train a model on the turns of demonstrations, a batch and a learning rate per step of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters())
    for batch, rate in zip(batches, rates, strict=False):
        optimizer.param_groups[0]["lr"] = rate
        tokens = tokenizer.apply_chat_template(
            list(batch),
            padding=True,
            return_tensors="pt",
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        sampled = tokens.pop("assistant_masks").bool()
        labels = tokens["input_ids"].masked_fill(~sampled, -100)
        model(**tokens, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def sft(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    demonstrations: Sequence[Messages],
    batch: int,
) -> None:
    """Train a model on demonstrations by TRL's SFTTrainer, one pass in this order."""
    from trl import SFTConfig, SFTTrainer

    with tempfile.TemporaryDirectory() as scratch:
        config = SFTConfig(
            output_dir=scratch,
            per_device_train_batch_size=batch,
            num_train_epochs=1,
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            warmup_steps=50,
            assistant_only_loss=True,
            train_sampling_strategy="sequential",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=500,
        )
        data = Dataset.from_list([{"messages": messages} for messages in demonstrations])
        SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer).train()
