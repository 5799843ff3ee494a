"""Worker of `update.py`: our trainers and TRL 1.16's GRPOTrainer on the fixed batch.

Everything runs through `trainer.train()`; a `rollout_func` returns the fixed episodes. A paced worker
waits for a line on its standard input before each batch; the line names how much is clipped.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import transformers
from _update_probe import Probe, read_episodes, read_job, send, trainable
from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer

from trl_stppo import STGRPOConfig, STGRPOTrainer, STPPOConfig, STPPOTrainer

PACKED = "perf/packed_share"


def lora(task: TaskType) -> LoraConfig:
    """The adapter of every subject."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type=task)


def rollout(job: dict[str, Any], episodes: list[dict[str, Any]], state: dict[str, Any]) -> Any:
    """The rollout_func: always the same episodes."""
    ours = job["kind"] != "grpo"

    def play(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        if len(prompts) != len(episodes):
            raise ValueError(f"{len(prompts)} prompts for {len(episodes)} episodes")
        if job["paced"]:
            state["case"] = sys.stdin.readline().strip()
        completions = [e["completion_ids"] for e in episodes]
        result: dict[str, Any] = {
            "prompt_ids": [e["prompt_ids"] for e in episodes],
            "completion_ids": completions,
            "logprobs": [[-1.0] * len(ids) for ids in completions],
        }
        spans = [e["turn_spans"] for e in episodes]
        if ours:
            return {**result, "turn_spans": [[tuple(s) for s in turns] for turns in spans]}
        masks = [[0] * len(ids) for ids in completions]
        for mask, turns in zip(masks, spans, strict=True):
            for start, end in turns:
                mask[start:end] = [1] * (end - start)
        return {**result, "env_mask": masks}

    return play


def clip_turns(
    batch: dict[str, Any], episodes: list[dict[str, Any]], chosen: dict[str, list[int]]
) -> None:
    """Make exactly the chosen turns clipped: their ratio is e, their advantage positive."""
    for row, episode in enumerate(episodes):
        for turn in chosen.get(str(row), []):
            start, end = episode["turn_spans"][turn]
            batch["old_per_token_logps"][row, start:end] -= 1.0
            batch["advantages"][row, start:end] = 1.0


def instrumented(
    base: type,
    probe: Probe,
    job: dict[str, Any],
    episodes: list[dict[str, Any]],
    state: dict[str, Any],
) -> type:
    """The trainer with a clock, and with the wanted tokens clipped."""

    class Measured(base):  # type: ignore[misc, valid-type]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            if "case" in state:
                clip_turns(batch, episodes, job["cases"][state["case"]])
            return batch

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            probe.begin()
            state["inputs"] = inputs
            return super()._compute_loss(model, inputs)

    return Measured


def settings(job: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the settings of both trainers: one optimizer step per batch, in micro-batches."""
    micro_batches = job["num_episodes"] // job["micro"]
    return {
        "output_dir": folder,
        "per_device_train_batch_size": job["micro"],
        "gradient_accumulation_steps": micro_batches,
        "steps_per_generation": micro_batches,
        "num_iterations": 1,
        "max_steps": job["updates"],
        "max_completion_length": job["longest"],
        "learning_rate": 1e-6,
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": job["checkpointing"],
        "bf16": job["device"] == "cuda",
        "use_cpu": job["device"] == "cpu",
        "model_init_kwargs": {"dtype": job["dtype"]},
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def quantization(job: dict[str, Any]) -> BitsAndBytesConfig | None:
    """NF4 for the QLoRA subjects."""
    if job["tuning"] != "qlora":
        return None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=getattr(torch, job["dtype"]),
    )


def separate_critic(job: dict[str, Any]) -> Any:
    """A sequence-classification model with an adapter of its own, where the subject wants one."""
    if job["tuning"] != "lora+separate":
        return None
    model = AutoModelForSequenceClassification.from_pretrained(
        job["model"], num_labels=1, dtype=job["dtype"]
    )
    return get_peft_model(model, lora(TaskType.SEQ_CLS))


def padded_seconds(trainer: Any, inputs: dict[str, Any], probe: Probe) -> float:
    """Seconds of TRL's forward and backward pass over the last micro-batch, and of nothing else."""
    ids, mask = (
        torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1)
        for name in ("ids", "mask")
    )
    kept = inputs["completion_mask"]
    started = probe.clock()
    logps, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, kept.size(1))
    (logps * kept).sum().backward()
    return probe.clock() - started


def build(job: dict[str, Any], probe: Probe, folder: str) -> tuple[Any, dict[str, Any]]:
    """The subject's trainer, and a dict that gets the inputs of its last loss."""
    episodes = read_episodes(job)
    state: dict[str, Any] = {}
    ours = job["kind"] != "grpo"
    kind = {"ours": STPPOTrainer, "critic-free": STGRPOTrainer, "grpo": GRPOTrainer}[job["kind"]]
    args: Any
    if job["kind"] == "critic-free":
        args = STGRPOConfig(num_generations=2, **settings(job, folder))
    elif ours:
        kl = {"kl_coef": job["kl_coef"]} if "kl_coef" in job else {}
        args = STPPOConfig(variant=job["variant"], **kl, **settings(job, folder))
    else:
        args = GRPOConfig(num_generations=2, **settings(job, folder))
    rows = [{"prompt": "one two"}] * (len(episodes) * job["updates"])
    value_model = separate_critic(job)
    trainer_class = instrumented(kind, probe, job, episodes, state)
    trainer = trainer_class(
        model=job["model"],
        reward_funcs=lambda completions, **_: [float(i % 3) for i in range(len(completions))],
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
        peft_config=None if job["tuning"] == "full" else lora(TaskType.CAUSAL_LM),
        quantization_config=quantization(job),
        rollout_func=rollout(job, episodes, state),
        **({"value_model": value_model} if value_model is not None else {}),
    )
    return trainer, state


def time_phases(trainer: Any, probe: Probe) -> None:
    """Tell the parts of our update apart; what has no name here is the rest.

    The correction is made with the optimizer, and its inside is not a fixed interface: what of it is
    there when the optimizer is gets timed, and the policy's parts hold what is not.
    """
    probe.phase(trainer._loop, "value_loss", "critic")
    probe.phase(trainer._loop, "policy_loss", "policy_forward")
    probe.phase(trainer.accelerator, "backward", "policy_backward")
    probe.phase(trainer._loop, "_before_step", "finish_gradients")
    probe.phase(trainer._loop, "after_backward", "clip_bias")
    make = trainer.create_optimizer

    def create(*args: Any, **kwargs: Any) -> Any:
        optimizer = make(*args, **kwargs)
        correction = trainer._loop.scale.correction
        for method in ("observe", "finish"):
            if hasattr(correction, method):
                probe.phase(correction, method, "clip_bias")
        probe.phase(optimizer, "step", "optimizer")
        return optimizer

    trainer.create_optimizer = create


def main() -> None:
    """Run the job given on the command line, and send what was measured."""
    job = read_job()
    transformers.logging.set_verbosity_error()

    def after(number: int) -> None:
        # Clocks inside the update make CUDA wait; there they get the last update for themselves.
        probe.timing_phases = job["device"] == "cpu" or number == job["updates"] - 2
        send({"update": probe.updates[-1]})

    probe = Probe(job, after)
    probe.timing_phases = job["device"] == "cpu"
    with tempfile.TemporaryDirectory() as folder:
        trainer, state = build(job, probe, folder)
        lists = [list(trainer.model.parameters())]
        if job["kind"] != "grpo":
            time_phases(trainer, probe)
            lists.append(trainer.critic.parameters())
        trainer.train()
        padded = {}
        if job["kind"] == "grpo" and not job["checkpointing"]:
            padded = {"padded_seconds": padded_seconds(trainer, state["inputs"], probe)}
    shares = [log[PACKED] for log in trainer.state.log_history if PACKED in log]
    name = "policy/clip_fraction"
    clipped = [float(log[name]) for log in trainer.state.log_history if name in log]
    send(
        {
            "done": {
                "updates": probe.updates,
                "phases": dict(probe.phases),
                "clip_fractions": clipped,
                "trainable": trainable(*lists),
                **({"packed": min(shares)} if shares else {}),
                **padded,
            }
        }
    )


if __name__ == "__main__":
    main()
