"""One scripted training per case that is named, on as many processes as it is started with.

Started by `test_two_processes.py` through torch.distributed.run.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig
from torch.nn.parallel import DistributedDataParallel

from tests.kit.contexts import cut_script
from tests.kit.fakes import char_tokenizer, float64_policy
from tests.kit.launch import save_cases
from tests.kit.scripted import EPISODES, Float64Groups, Float64Trainer, logged, train
from trl_stppo.trainer.batch import Targets, full_sequence
from trl_stppo.trainer.loop import forward
from trl_stppo.trainer.stabilizers import TrustRegion
from trl_stppo.trainer.training_loop import TrainingLoop

LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}
CORRECTED = {
    "importance_sampling_level": "turn",
    "stabilizers": ["share"],
    "clip_bias_estimator": "exact",
}
CASES: dict[str, dict[str, Any]] = {
    "full policy, separate critic": {"variant": "st-ppo", "entropy_coef": 0.01},
    "scaled gradient": {"stabilizers": ["triggered"], "max_grad_norm": 0.5, "beta": 0.1},
    "weighted episodes": {"variant": "st-ppo", "stabilizers": ["share", "winners"]},
    "a step that follows the KL": {"variant": "st-ppo", "stabilizers": ["trust_region", "share"],
                                   "desired_kl": 1e-6, "learning_rate": 3.0},
    "a process without a winner": {"variant": "st-ppo", "stabilizers": ["share", "winners"]},
    "LoRA, shared critic": {"lora": True, "variant": "st-ppo", "learning_rate": 1.0,
                            "critic_warmup_steps": 2, "whiten_rewards": True,
                            "ddp_find_unused_parameters": False},
    "estimated": {"variant": "st-ppo", "clip_bias_estimator": "logits", "entropy_coef": 0.1},
    # DDP exchanges buffers, in the passes that come after one with gradients: both ranks must make
    # equally many of these.
    "groups of several lengths": {"variant": "st-ppo", "ragged": True,
                                  "ddp_find_unused_parameters": False},
    "one group, as weights may be unused": {"variant": "st-ppo", "ragged": True,
                                            "ddp_find_unused_parameters": True},
    "contexts": {"variant": "st-ppo", "stabilizers": ["share", "winners"], "contexts": True},
    "RLOO": {"variant": "rloo", **CORRECTED, "num_generations": 2},
    "ReBN": {"variant": "rebn", **CORRECTED, "num_generations": 1, "gamma": 0.9},
}  # fmt: skip
FIGURES = (
    "loss", "clip_bias/scale",
    *(f"clip_bias/{name}_estimate" for name in ("norm", "grad_norm", "share")),
    "policy/clip_fraction", "policy/ratio_max", "policy/entropy", "value/loss", "value/grad_norm",
    "value/explained_variance", "advantage/mean", "advantage/std", "objective/kl", "episode/score",
    "turns/mean",
)  # fmt: skip


class LastWinsLoop(TrainingLoop):
    """Of all episodes the last one of the last process alone goes better than expected."""

    def targets(self, *args: Any) -> Targets:
        targets = super().targets(*args)
        signs = -torch.ones(len(targets.advantages), 1)
        if self.accelerator.process_index == self.accelerator.num_processes - 1:
            signs[-1] = 1.0
        return Targets(**{**vars(targets), "advantages": signs * targets.advantages.abs()})


class LastWins(Float64Trainer):
    loop_class = LastWinsLoop


@contextmanager
def overhead(tokens: float | None) -> Iterator[None]:
    """What one more pass is said to cost on the CPU; None leaves it."""
    kept = forward.PASS_OVERHEAD["cpu"]
    forward.PASS_OVERHEAD["cpu"] = kept if tokens is None else tokens
    try:
        yield
    finally:
        forward.PASS_OVERHEAD["cpu"] = kept


@contextmanager
def quiet_passes() -> Iterator[list[Any]]:
    """Gets an entry for each pass of DDP that exchanges nothing."""
    original, seen = DistributedDataParallel.no_sync, list[Any]()
    DistributedDataParallel.no_sync = lambda model: seen.append(model) or original(model)
    try:
        yield seen
    finally:
        DistributedDataParallel.no_sync = original


def run(case: str, folder: Path) -> dict[str, Any]:
    """Three rollouts of eight episodes, two epochs of one mini-batch each: six steps."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    options = dict(CASES[case])
    if options.pop("lora", False):
        options["peft_config"] = LoraConfig(task_type="CAUSAL_LM", **LORA)
    if options.pop("contexts", False):
        options |= {"rollout_func": cut_script, "staleness": 0.0, "learning_rate": 5.0}
    if world > 1:
        options["ddp_backend"] = "gloo"
    ragged = options.pop("ragged", False)
    if ragged:
        options["model"] = float64_policy(char_tokenizer())
        options["model"].register_buffer("exchanged", torch.zeros(1))
    kind = Float64Groups if "num_generations" in options else Float64Trainer
    few = patch.object(TrustRegion, "least_turns", 8)
    with overhead(0.0 if ragged else None), quiet_passes() as quiet, few:
        trainer, recorder = train(
            folder, per_device_train_batch_size=EPISODES // world, num_ppo_epochs=2, max_steps=6,
            trainer_class=LastWins if case == "a process without a winner" else kind, **options,
        )  # fmt: skip
        if ragged:
            ids, mask, _ = full_sequence(recorder.batches[0])
            assert len(trainer._forward.parts(ids, mask, None)) > 1, "the case should be interesting"
            assert bool(quiet) is (world > 1 and case.startswith("groups"))
    assert trainer.accelerator.num_processes == world
    assert isinstance(trainer.model_wrapped, DistributedDataParallel) is (world > 1)
    assert len(recorder.after) == 6
    exact = [f"clip_bias/{name}" for name in ("norm", "grad_norm", "cosine")]
    figures = list(FIGURES) if case == "estimated" else [*FIGURES, *exact]
    if "trust_region" in trainer.args.stabilizers:
        figures += ["step/kl_per_turn", "step/allowed_kl", "step/factor", "step/refused"]
    if not trainer.has_critic:
        figures = [n for n in figures if not n.startswith(("value/", "objective/"))]
        figures.append("reward_std")
    return {
        "figures": {name: logged(trainer, name) for name in figures},
        "before": recorder.before,
        "after": recorder.after,
    }


if __name__ == "__main__":
    save_cases(run)
