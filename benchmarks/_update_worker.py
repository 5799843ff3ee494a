"""Worker of `update.py`: our trainers and TRL 1.16's GRPOTrainer on the fixed batch.

Everything runs through `trainer.train()`; a `rollout_func` returns the fixed episodes. A paced worker
waits for a line on its standard input before each batch; the line names how much is clipped.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
import transformers
from _episodes import QUIET, Episode, clip_turns, fixed
from _launch import send
from _probe import Probe
from geometries import four_bit, lora, separate_critic
from trl import GRPOConfig, GRPOTrainer

from trl_stppo import STGRPOConfig, STGRPOTrainer, STPPOConfig, STPPOTrainer

PACKED, CLIPPED = "perf/packed_share", "policy/clip_fraction"
# Every other subject is a variant of STPPOTrainer.
WITHOUT_CRITIC = {"critic-free": (STGRPOTrainer, STGRPOConfig), "grpo": (GRPOTrainer, GRPOConfig)}


def instrumented(
    base: type, probe: Probe, job: dict[str, Any], episodes: list[Episode], state: dict[str, Any]
) -> type:
    """The trainer with a clock, and with the wanted tokens clipped; `state` gets its last inputs."""

    class Measured(base):  # type: ignore[misc, valid-type]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            case = job["cases"][sys.stdin.readline().strip()] if job["paced"] else {}
            batch = super()._generate_and_score_completions(inputs)
            clip_turns(batch, episodes, case)
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
        **QUIET,
    }


def padded_seconds(trainer: Any, inputs: dict[str, Any], probe: Probe) -> float:
    """Seconds of TRL's forward and backward pass over the last micro-batch, and of nothing else."""
    ids, mask = (
        torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1) for name in ("ids", "mask")
    )
    kept = inputs["completion_mask"]
    started = probe.clock()
    logps, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, kept.size(1))
    (logps * kept).sum().backward()
    return probe.clock() - started


def build(job: dict[str, Any], probe: Probe, folder: str) -> tuple[Any, dict[str, Any]]:
    """The subject's trainer, and a dict that gets the inputs of its last loss."""
    episodes = json.loads(Path(job["episodes"]).read_text())
    state: dict[str, Any] = {}
    variant, tuning, dtype = job["variant"], job["tuning"], getattr(torch, job["dtype"])
    kind, config = WITHOUT_CRITIC.get(variant, (STPPOTrainer, STPPOConfig))
    options: dict[str, Any] = {"num_generations": 2}
    if variant not in WITHOUT_CRITIC:
        options = {"variant": variant, **({"kl_coef": job["kl_coef"]} if "kl_coef" in job else {})}
    critic = {}
    if tuning == "lora+separate":
        critic = {"value_model": separate_critic(job["model"], dtype, adapters=True)}
    trainer = instrumented(kind, probe, job, episodes, state)(
        **fixed(job["model"], episodes),
        args=config(**options, **settings(job, folder)),
        peft_config=None if tuning == "full" else lora(),
        quantization_config=four_bit(dtype) if tuning == "qlora" else None,
        **critic,
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
    probe.phase(trainer._loop.step, "close", "finish_gradients")
    make = trainer.create_optimizer

    def create(*args: Any, **kwargs: Any) -> Any:
        optimizer = make(*args, **kwargs)
        for part in (trainer._loop.step.exact, trainer._loop.step.estimate):
            if part is not None:
                probe.phase(part, "add", "clip_bias")
        probe.phase(optimizer, "step", "optimizer")
        return optimizer

    trainer.create_optimizer = create


def main() -> None:
    """Run the job given on the command line, and send what was measured."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    cpu, grpo = job["device"] == "cpu", job["variant"] == "grpo"

    def after(number: int) -> None:
        # Clocks inside the update make CUDA wait; there they get the last update for themselves.
        probe.timing_phases = cpu or number == job["updates"] - 2
        if job["paced"]:
            send(probe.updates[-1])

    probe = Probe(job["device"], after)
    probe.timing_phases = cpu
    with tempfile.TemporaryDirectory() as folder:
        trainer, state = build(job, probe, folder)
        parameters = [*trainer.model.parameters()]
        if not grpo:
            time_phases(trainer, probe)
            parameters += trainer.critic.parameters()
        trainer.train()
        padded = {}
        if grpo and not job["checkpointing"]:
            padded = {"padded_seconds": padded_seconds(trainer, state["inputs"], probe)}
    logs = trainer.state.log_history
    shares = [log[PACKED] for log in logs if PACKED in log]
    trained = {id(p): p.numel() for p in parameters if p.requires_grad}
    send(
        {
            "updates": probe.updates,
            "phases": dict(probe.phases),
            "clip_fractions": [float(log[CLIPPED]) for log in logs if CLIPPED in log],
            "trainable": sum(trained.values()),
            **({"packed": min(shares)} if shares else {}),
            **padded,
        }
    )


if __name__ == "__main__":
    main()
