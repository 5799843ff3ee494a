"""Trainings whose critic FSDP2 holds in pieces, on as many processes as are started; see `engine_run`.

Started by `test_fsdp_critic.py` with a folder and the names of jobs.
"""

import gc
import math
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaConfig, LlamaForSequenceClassification, TrainerCallback
from trl.generation.vllm_generation import VLLMGeneration

from tests.kit.engine_run import build, engine, whole
from tests.kit.fakes import char_tokenizer
from trl_stppo.models.critic import HEAD_FILE
from trl_stppo.paths import CRITIC_FOLDER
from trl_stppo.trainer.batch import full_sequence
from trl_stppo.trainer.loop import forward
from trl_stppo.trainer.sharding.critics import ShardedGradient

STEPS = 6
WIDTH = 96
TIMEOUT = 10


def llama_critic() -> LlamaForSequenceClassification:
    """Of another family than the policy, whose layers have another name."""
    torch.manual_seed(1)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_labels": 1}
    config = LlamaConfig(vocab_size=len(char_tokenizer()), pad_token_id=0, **sizes, **heads)
    return LlamaForSequenceClassification(config)


class Held(TrainerCallback):
    """Bytes of this process: of the critic's weights, gradient and moments, and of all tensors."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.figures: dict[str, int] = {}

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        grads = self.trainer._optimizer_step.critic_grads
        self.figures["weights"] = held(grads.parameters)
        self.figures["gradient"] = held(grads._grads)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        state = self.trainer._optimizers.critic.optimizer.state.values()
        self.figures["moments"] = held([v for kept in state for v in kept.values() if v.ndim])
        gc.collect()
        tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
        pieces = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in pieces}
        self.figures["all"] = sum(storages.values())


def held(tensors: Any) -> int:
    """Bytes of what this process has of some tensors."""
    pieces = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in pieces)


def options_of(chosen: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Settings of six rollout batches, on any number of processes."""
    accumulates = 4 // int(os.environ["WORLD_SIZE"])
    steps = {"max_steps": STEPS, "num_ppo_epochs": 1, "gradient_accumulation_steps": accumulates}
    return {**chosen, **steps, "save_strategy": "steps", "save_steps": 1, **options}


def long_run(folder: Path, name: str, resume: Path | None = None) -> dict[str, Any]:
    """All steps, or those after a checkpoint, with a critic of another family."""
    with engine(name) as chosen:
        trainer, weights = build(folder, {**options_of(chosen), "critic": llama_critic()})
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        trainer.save_model(str(folder / "final"))
        trainer.accelerator.wait_for_everyone()
        after = {n: whole(p) for n, p in trainer.critic.model.named_parameters()}
        units = [m for m in trainer.critic.model.modules() if isinstance(m, FSDPModule)]
        plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
        return {
            "after": weights.after,
            "units": [type(unit).__name__ for unit in units],
            "policy's layers": plugin and plugin.transformer_cls_names_to_wrap,
            "critic": after,
            "saved": load_file(folder / "final" / CRITIC_FOLDER / "model.safetensors"),
        }


def held_of(folder: Path) -> dict[str, int]:
    """Two steps, with nothing beside the trainer that holds weights."""
    with engine("FSDP2") as chosen:
        options = {**options_of(chosen, max_steps=2), "critic": llama_critic()}
        trainer, weights = build(folder, options)
        trainer.remove_callback(weights)
        callback = Held()
        callback.trainer = trainer
        trainer.add_callback(callback)
        trainer.train()
        return callback.figures


def best(folder: Path, **options: Any) -> dict[str, Any]:
    """The best checkpoint's weights, in a trainer that has gone on from there."""
    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "rows": 3, "played": True}
    with engine("FSDP2") as chosen:
        settings = options_of(chosen, max_steps=3, load_best_model_at_end=True)
        trainer, weights = build(folder, {**evaluates, **settings, **options})
        trainer.train()
        step = trainer.state.best_global_step
        last = [whole(p) for p in trainer.critic.parameters()]
        then = [weights.after[step][f"critic/{i}"] for i in range(len(last))]
        end = [weights.after[-1][f"critic/{i}"] for i in range(len(last))]
        return {"step": step, "last": last, "then": then, "end": end}


def shared(folder: Path) -> dict[str, Any]:
    """What is saved of a shared critic, and what an inference engine would get."""
    with engine("FSDP2") as chosen:
        trainer, _ = build(folder, {**options_of(chosen, max_steps=2), "lora": True})
        trainer.train()
        trainer.save_model(str(folder / "final"))
        trainer.accelerator.wait_for_everyone()
        pusher = SimpleNamespace(
            accelerator=trainer.accelerator,
            _fix_param_name_to_vllm=lambda name, extra_prefixes=(): name,
        )
        pushed = [name for name, _ in VLLMGeneration._iter_fsdp2_params(pusher, trainer.model)]
        final = folder / "final"
        critic = load_file(final / CRITIC_FOLDER / "adapter_model.safetensors")
        named = {n: whole(p) for n, p in trainer.model.named_parameters() if ".critic." in n}
        return {
            "pushed": pushed,
            "policy": list(load_file(final / "adapter_model.safetensors")),
            "adapter": critic,
            "trained": named,
            "head": load_file(final / CRITIC_FOLDER / HEAD_FILE),
            "trained head": {n: whole(p) for n, p in trainer.critic.head.named_parameters()},
        }


def poisoned(folder: Path) -> list[dict[str, Tensor]]:
    """Weights after each step, at whose second one the critic's loss is NaN on the second process."""
    with engine("FSDP2") as chosen:
        trainer, weights = build(folder, {**options_of(chosen, max_steps=3), "critic": "given"})
        add, rank = ShardedGradient.add, int(os.environ["RANK"])

        def poison(self: ShardedGradient, loss: Tensor) -> None:
            add(self, loss * (math.nan if rank and trainer.state.global_step == 1 else 1.0))

        with mock.patch.object(ShardedGradient, "add", poison):
            trainer.train()
        assert trainer._guards.state_dict()["skipped_steps"] == 1
        return weights.after


def uneven(folder: Path) -> list[int]:
    """Passes of the critic that rows of like lengths would ask for, by rollout; unequal on both processes."""
    groups: list[int] = []
    cheap = mock.patch.dict(forward.PASS_OVERHEAD, cpu=0.0)
    with engine("FSDP2") as chosen, cheap:
        steps = options_of(chosen, max_steps=2, ddp_timeout=6 * TIMEOUT)
        options = {**steps, "critic": "given", "played": True}
        trainer, _ = build(folder, options)
        original = trainer._loop.rollout_values

        def values(batch: Any) -> Any:
            ids, mask, _ = full_sequence(batch)
            groups.append(len(trainer._forward.parts(ids, mask, None)))
            return original(batch)

        trainer._loop.rollout_values = values
        trainer.train()
    return groups


def stuck(folder: Path, how: str) -> None:
    """A training in which the second process does not come to the critic's pass of the second step."""
    with engine("FSDP2") as chosen:
        trainer, _ = build(folder, {**chosen, "critic": "given", "ddp_timeout": TIMEOUT})
        original = trainer._loop.value_loss

        def value_loss(*args: Any) -> Tensor:
            if int(os.environ["RANK"]) == 0 or trainer.state.global_step < 1:
                return original(*args)
            if how == "waits":
                time.sleep(10 * TIMEOUT)
            return torch.zeros(())

        trainer._loop.value_loss = value_loss
        trainer.train()


def main() -> None:
    folder, *jobs = Path(sys.argv[1]), *sys.argv[2:]
    whole_jobs = {"held": held_of, "poisoned": poisoned, "uneven": uneven, "shared": shared}
    results: dict[str, Any] = {}
    for job in jobs:
        kind, _, rest = job.partition(" ")
        if kind == "long":
            results[job] = long_run(folder / rest, rest)
        elif kind == "resumed":
            own, checkpoint = rest.split()
            results[job] = long_run(folder / own, "FSDP2", folder / checkpoint)
        elif kind == "best":
            results[job] = best(folder / job, critic="given")
            results["best of it"] = best(folder / "best shared", lora=True)
        elif kind == "stuck":
            stuck(folder / job, rest)
        else:
            results[job] = whole_jobs[kind](folder / job)
        gc.collect()
    torch.save(results, folder / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
