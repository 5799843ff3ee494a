"""Traffic of several processes per update, and their gain: 1, 2 and 4 of them on this machine.

    python benchmarks/scaling.py            # about five minutes on two cores
    python benchmarks/scaling.py --quick    # under a minute

Bytes are counted at the collectives, and compared with the arithmetic of `docs/many_gpus.md`. Times hold
for this machine's cores only: with more processes than cores they measure the sharing of cores. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
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
from _episodes import QUIET, clip_cases, clip_turns, fixed, make_episodes, tokens
from _launch import ONE_THREAD, launch, send
from _outcome import finish, show
from geometries import lora, save_random_model
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from transformers import AutoTokenizer, TrainerCallback, logging

from trl_stppo import STPPOConfig, STPPOTrainer

FLOAT_BYTES = 4
PURPOSES = ("policy gradient", "critic gradient", "clipping bias", "figures")
COLUMNS = ("processes", "tokens/s", "x", *PURPOSES, "expected", "per rollout")
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce")


# ------------------------------------------------------------------------ one process


class Counts:
    """Bytes that this process gave to collectives, by what they were for."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.purpose = "figures"
        for name in COLLECTIVES:
            setattr(dist, name, self._counted(getattr(dist, name), gathers="gather" in name))

    def _counted(self, original: Callable[..., Any], gathers: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[1] if gathers else args[0]
            self.bytes[self.purpose] += tensor.numel() * tensor.element_size()
            return original(*args, **kwargs)

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
            trainer.model_wrapped.register_comm_hook(None, lambda state, bucket: counts.ddp_hook(bucket))
        counts.watch(trainer._optimizer_step.critic_grads, "reduce", "critic gradient")
        if trainer._loop.step.exact is not None:
            counts.watch(trainer._loop.step.exact, "finish", "clipping bias")
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
        elif state.global_step % self.steps_per_rollout != 1:
            self.seconds.append(time.perf_counter() - self._last)


def build(job: dict[str, Any], folder: str, watch: Watch) -> Any:
    """Our trainer on fixed episodes, half of whose tokens are clipped."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    per_process = job["episodes"] // world if job["strong"] else job["episodes"]
    eos = AutoTokenizer.from_pretrained(job["model"]).eos_token_id
    episodes = make_episodes(per_process, job["longest"], eos, equal=True)

    class Clipped(STPPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batch = super()._generate_and_score_completions(inputs)
            clip_turns(batch, episodes, clip_cases(episodes)["half of the tokens"])
            return batch

    trainer = Clipped(
        **fixed(job["model"], episodes),
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
            **QUIET,
        ),
        peft_config=lora() if job["tuning"] == "lora" else None,
        callbacks=[watch],
    )
    watch.trainer = trainer
    if trainer.accelerator.num_processes != world:
        raise RuntimeError(f"{trainer.accelerator.num_processes} processes instead of {world}")
    job["tokens"] = tokens(episodes)
    return trainer


def work(job: dict[str, Any]) -> None:
    """Train as one process of a run; process 0 sends the figures."""
    logging.set_verbosity_error()
    counts = Counts()
    watch = Watch(counts, job["epochs"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(job, folder, watch)
        trainer.train()
    steps = job["epochs"] * (job["rollouts"] - 1)
    rollout_bytes = counts.bytes.pop("rollout", 0) / (job["rollouts"] - 1)
    critic = {id(p) for p in trainer.critic.parameters()}
    policy = [p for p in trainer.model.parameters() if p.requires_grad and id(p) not in critic]
    result = {
        "seconds_per_update": statistics.median(watch.seconds),
        "tokens_per_update": job["tokens"],
        "bytes_per_update": {name: count / steps for name, count in counts.bytes.items()},
        "bytes_per_rollout": rollout_bytes,
        "policy_parameters": sum(p.numel() for p in policy),
        "critic_parameters": sum(p.numel() for p in trainer.critic.parameters()),
    }
    if trainer.accelerator.is_main_process:
        send(result)


# ------------------------------------------------------------------------- all of them


def expected_bytes(result: dict[str, Any]) -> dict[str, int]:
    """Return the bytes that a process gives to collectives per update, from the numbers of parameters."""
    return {
        "policy gradient": FLOAT_BYTES * result["policy_parameters"],
        "critic gradient": FLOAT_BYTES * result["critic_parameters"],
        "clipping bias": FLOAT_BYTES * result["policy_parameters"],
    }


def rows(runs: dict[int, dict[str, Any]]) -> list[list[str]]:
    """One row per number of processes."""
    single, table = runs[1]["tokens_per_second"], []
    for processes, result in runs.items():
        sent = result["bytes_per_update"]
        expected = sum(expected_bytes(result).values()) if processes > 1 else 0
        rate = result["tokens_per_second"]
        sizes = [*(sent.get(name, 0) for name in PURPOSES), expected, result["bytes_per_rollout"]]
        table.append([str(processes), f"{rate:,.0f}", f"{rate / single:.2f}", *map(_size, sizes)])
    return table


def _size(count: float) -> str:
    return f"{count / 2**20:.2f} MiB" if count >= 2**17 else f"{count / 2**10:.1f} KiB"


def main() -> None:
    """Measure, print the tables, then the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, LoRA only, weak scaling")
    parser.add_argument("--processes", type=int, nargs="+", help="1 2 4, or 1 2 if quick")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        return work(options.job)
    options.processes = options.processes or ([1, 2] if options.quick else [1, 2, 4])
    if options.processes[0] != 1:
        parser.error("`--processes` must begin with 1, which the others are compared with")
    figures: dict[str, Any] = {"cores": os.cpu_count(), "quick": options.quick}
    cases = [("lora", False)] if options.quick else [("lora", False), ("lora", True), ("full", False)]
    with tempfile.TemporaryDirectory() as folder:
        model = save_random_model("tiny", folder)
        for tuning, strong in cases:
            name = f"{tuning}, {'16 episodes in all' if strong else 'episodes per process'}"
            job = {
                "model": model,
                "tuning": tuning,
                "strong": strong,
                "episodes": 16 if strong else 4 if options.quick else 8,
                "micro": 4,
                "longest": 96 if options.quick else 256,
                "epochs": 3,
                "rollouts": 2 if options.quick else 4,
            }
            runs = {}
            for processes in options.processes:
                words = ("--job", json.dumps(job))
                result = launch("scaling.py", *words, processes=processes, **ONE_THREAD)
                if "error" in result:
                    finish({**figures, name: result})
                runs[processes] = result
                total = result["tokens_per_update"] * processes
                result["tokens_per_second"] = total / result["seconds_per_update"]
                result["expected_bytes_per_update"] = expected_bytes(result)
            show(name, COLUMNS, rows(runs))
            figures[name] = runs
    finish(figures)


if __name__ == "__main__":
    main()
