"""Worker of `scaling.py`: one process of a training run, counting what it gives to collectives.

Started through torch.distributed.run; process 0 prints the result as one line.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import torch.distributed as dist
import transformers
from _update_batch import clip_cases, make_episodes, tokens
from datasets import Dataset
from peft import LoraConfig
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from transformers import AutoTokenizer, TrainerCallback

from trl_stppo import STPPOConfig, STPPOTrainer

MARK = "scaling-result "
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce")


class Counts:
    """Bytes that this process gave to collectives, and seconds it waited, by what they were for."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.purpose = "figures"
        for name in COLLECTIVES:
            setattr(dist, name, self._counted(getattr(dist, name), gathers="gather" in name))

    def _counted(self, original: Callable[..., Any], gathers: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[1] if gathers else args[0]
            started = time.perf_counter()
            result = original(*args, **kwargs)
            self.seconds[self.purpose] += time.perf_counter() - started
            self.bytes[self.purpose] += tensor.numel() * tensor.element_size()
            return result

        return call

    @contextmanager
    def of(self, purpose: str) -> Any:
        """Count under another name."""
        before, self.purpose = self.purpose, purpose
        try:
            yield
        finally:
            self.purpose = before

    def watch(self, owner: Any, method: str, purpose: str) -> None:
        """Count what a method exchanges under a name."""
        original = getattr(owner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.of(purpose):
                return original(*args, **kwargs)

        setattr(owner, method, call)

    def ddp_hook(self, bucket: dist.GradBucket) -> Any:
        """DDP's own exchange, counted."""
        with self.of("policy gradient"):
            return allreduce_hook(None, bucket)  # type: ignore[arg-type]


class Watch(TrainerCallback):
    """Clocks the optimizer steps and resets the counts after the first rollout batch."""

    def __init__(self, counts: Counts, steps_per_rollout: int) -> None:
        self.counts, self.steps_per_rollout = counts, steps_per_rollout
        self.trainer: Any = None
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Everything that is wrapped exists now."""
        trainer, counts = self.trainer, self.counts
        if isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel):
            trainer.model_wrapped.register_comm_hook(
                None, lambda state, bucket: counts.ddp_hook(bucket)
            )
        counts.watch(trainer._optimizers.critic_grads, "reduce", "critic gradient")
        if trainer._loop.scale.correction is not None:
            counts.watch(trainer._loop.scale.correction, "finish", "clipping bias")
        counts.watch(trainer, "_generate_and_score_completions", "rollout")

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Processes start together, so that a step's time holds no waiting of the one before."""
        if dist.is_initialized():
            dist.barrier()
        self._last = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the time of steps without a rollout."""
        if state.global_step == self.steps_per_rollout:
            self.counts.bytes.clear()
            self.counts.seconds.clear()
        elif state.global_step % self.steps_per_rollout != 1:
            self.seconds.append(time.perf_counter() - self._last)


def build(job: dict[str, Any], folder: str, watch: Watch) -> Any:
    """Our trainer on fixed episodes, half of whose tokens are clipped."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    per_process = job["episodes"] // world if job["strong"] else job["episodes"]
    episodes = make_episodes(per_process, job["longest"], tokenizer.eos_token_id, equal=True)
    clipped = clip_cases(episodes)["half of the tokens"]
    lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")

    class Clipped(STPPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            for row, turns in clipped.items():
                for turn in turns:
                    start, end = episodes[row]["turn_spans"][turn]
                    batch["old_per_token_logps"][row, start:end] -= 1.0
                    batch["advantages"][row, start:end] = 1.0
            return batch

    trainer = Clipped(
        model=job["model"],
        reward_funcs=lambda completions, **_: [float(i % 3) for i in range(len(completions))],
        args=STPPOConfig(
            output_dir=folder,
            per_device_train_batch_size=job["micro"],
            gradient_accumulation_steps=per_process // job["micro"],
            num_mini_batches=1,
            num_ppo_epochs=job["epochs"],
            max_steps=job["epochs"] * job["rollouts"],
            max_completion_length=job["longest"],
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            ddp_backend="gloo" if world > 1 else None,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": "one"}] * (per_process * world)),
        processing_class=tokenizer,
        peft_config=lora if job["tuning"] == "lora" else None,
        rollout_func=lambda prompts, trainer: {
            "prompt_ids": [e["prompt_ids"] for e in episodes],
            "completion_ids": [e["completion_ids"] for e in episodes],
            "turn_spans": [[tuple(s) for s in e["turn_spans"]] for e in episodes],
            "logprobs": None,
        },
        callbacks=[watch],
    )
    watch.trainer = trainer
    if trainer.accelerator.num_processes != world:
        raise RuntimeError(f"{trainer.accelerator.num_processes} processes instead of {world}")
    job["tokens"] = tokens(episodes)
    return trainer


def main() -> None:
    """Run the job given on the command line."""
    job = json.loads(sys.argv[1])
    transformers.logging.set_verbosity_error()
    counts = Counts()
    watch = Watch(counts, job["epochs"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(job, folder, watch)
        trainer.train()
    steps = job["epochs"] * (job["rollouts"] - 1)
    rollout_bytes = counts.bytes.pop("rollout", 0) / (job["rollouts"] - 1)
    counts.seconds.pop("rollout", None)
    critic = {id(p) for p in trainer.critic.parameters()}
    policy = [p for p in trainer.model.parameters() if p.requires_grad and id(p) not in critic]
    result = {
        "seconds_per_update": statistics.median(watch.seconds),
        "tokens_per_update": job["tokens"],
        "bytes_per_update": {name: count / steps for name, count in counts.bytes.items()},
        "bytes_per_rollout": rollout_bytes,
        "wait_seconds_per_update": sum(counts.seconds.values()) / steps,
        "policy_parameters": sum(p.numel() for p in policy),
        "critic_parameters": sum(p.numel() for p in trainer.critic.parameters()),
    }
    if trainer.accelerator.is_main_process:
        print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
