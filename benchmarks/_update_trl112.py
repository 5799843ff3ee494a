"""Worker of `update.py`: the PPOTrainer of TRL 1.12, run by an interpreter that has that version.

Its generation is replaced by the fixed responses, with the logits that it would have kept; the
reward model is as small as possible. Everything else is upstream's, through `trainer.train()`.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import transformers
from _update_probe import Probe, read_episodes, read_job, send, trainable
from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer


def lora(task: TaskType) -> LoraConfig:
    """The adapter of every subject."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type=task)


def fixed_generation(episodes: list[dict[str, Any]]) -> Any:
    """Stands in for `batch_generation`: the fixed responses, found by their prompts."""
    by_prompt = {tuple(e["prompt_ids"]): e["completion_ids"] for e in episodes}
    width = max(len(ids) for ids in by_prompt.values())

    @torch.no_grad()
    def batch_generation(
        model: Any, queries: torch.Tensor, size: int, pad_token_id: int, _: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        responses = queries.new_full((len(queries), width), pad_token_id)
        for row, query in enumerate(queries):
            ids = by_prompt[tuple(query[query != pad_token_id].tolist())]
            responses[row, : len(ids)] = queries.new_tensor(ids)
        whole = torch.cat([queries, responses], dim=1)
        # `generate` returns float32 scores of the whole batch, which `train` keeps to its end.
        logits = torch.empty(
            (*responses.shape, model.config.vocab_size), dtype=torch.float32, device=whole.device
        )
        for start in range(0, len(whole), size):
            rows = whole[start : start + size]
            out = model(input_ids=rows, attention_mask=rows != pad_token_id, use_cache=False)
            logits[start : start + size] = out.logits[:, queries.size(1) - 1 : -1]
            del out
        return whole, logits

    return batch_generation


def small_reward_model(tokenizer: Any) -> Any:
    """Only the rollout asks it."""
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForSequenceClassification(config)


def build(job: dict[str, Any], probe: Probe, folder: str) -> Any:
    """Upstream's trainer."""
    episodes = read_episodes(job)
    forward = ppo_trainer.forward

    def measured(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            probe.begin()
        return forward(*args, **kwargs)

    ppo_trainer.forward = measured
    ppo_trainer.batch_generation = fixed_generation(episodes)
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    value_model = AutoModelForSequenceClassification.from_pretrained(
        job["model"], num_labels=1, dtype=job["dtype"]
    )
    if job["tuning"] == "lora+separate":
        value_model = get_peft_model(value_model, lora(TaskType.SEQ_CLS))
    args = PPOConfig(
        output_dir=folder,
        per_device_train_batch_size=job["micro"],
        gradient_accumulation_steps=job["num_episodes"] // job["micro"],
        local_rollout_forward_batch_size=job["micro"],
        num_mini_batches=1,
        num_ppo_epochs=1,
        total_episodes=job["num_episodes"] * job["updates"],
        response_length=job["longest"],
        temperature=1.0,
        num_sample_generations=0,
        learning_rate=1e-6,
        optim="adamw_torch_fused",
        gradient_checkpointing=job["checkpointing"],
        bf16=job["device"] == "cuda",
        use_cpu=job["device"] == "cpu",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    # One batch more than is used: at the end of the data accelerate steps after every micro-batch.
    ids = [e["prompt_ids"] for e in episodes] * (job["updates"] + 1)
    trainer = PPOTrainer(
        args=args,
        processing_class=tokenizer,
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=job["dtype"]),
        ref_model=None,
        reward_model=small_reward_model(tokenizer),
        value_model=value_model,
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        peft_config=None if job["tuning"] == "full" else lora(TaskType.CAUSAL_LM),
    )
    # Unshuffled, so that every batch holds each episode once.
    trainer.dataloader = trainer.accelerator.prepare(
        DataLoader(trainer.train_dataset, len(episodes), collate_fn=trainer.data_collator)
    )
    return trainer


def main() -> None:
    """Run the job given on the command line, and send what was measured."""
    job = read_job()
    transformers.logging.set_verbosity_error()
    probe = Probe(job)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(job, probe, folder)
        numbers = trainable(trainer.policy_model.parameters(), trainer.value_model.parameters())
        trainer.train()
    episodes, vocab_size = read_episodes(job), trainer.policy_model.config.vocab_size
    width = max(len(e["completion_ids"]) for e in episodes)
    send(
        {
            "done": {
                "updates": probe.updates,
                "trainable": numbers,
                "kept_logits_mb": len(episodes) * width * vocab_size * 4 / 1e6,
            }
        }
    )


if __name__ == "__main__":
    main()
