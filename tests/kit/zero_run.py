"""Trainings whose critic has a DeepSpeed engine of its own, on two processes; see `engine_run`.

Started by `test_deepspeed_critic.py` with a folder and the names of engines.
"""

import gc
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen2ForSequenceClassification, TrainerCallback

from tests.kit.engine_run import LORA, build, engine, split_all, whole
from tests.kit.fakes import char_tokenizer, tiny_config
from trl_stppo.errors import CheckpointError
from trl_stppo.paths import CRITIC_FOLDER
from trl_stppo.trainer.disk import read_manifest
from trl_stppo.trainer.sharding.critics import FOLDER

WIDTH = 96


class Held(TrainerCallback):
    """Bytes that this process has of the critic: weights, gradient before the step, moments."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.figures: dict[str, int] = {}

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        grads = self.trainer._optimizer_step.critic_grads
        pieces = [getattr(p, "ds_tensor", p) for p in grads.parameters]
        self.figures["weights"] = size(pieces)
        self.figures["gradient"] = size(p for g in grads._groups().values() for p in g)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        state = self.trainer._optimizers.critic.optimizer.state.values()
        self.figures["moments"] = size(v for of in state for v in of.values() if v.ndim)


def size(tensors: Iterable[Tensor]) -> int:
    """Their bytes."""
    return sum(t.numel() * t.element_size() for t in tensors)


def wide_critic() -> Qwen2ForSequenceClassification:
    """Of a size at which padding does not count."""
    torch.manual_seed(1)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_labels": 1}
    return Qwen2ForSequenceClassification(tiny_config(char_tokenizer(), **sizes))


def held(folder: Path, chosen: dict[str, Any]) -> dict[str, Any]:
    """What a process has of a critic."""
    trainer, weights = build(folder, {**chosen, "max_steps": 2, "critic": wide_critic()})
    split_all(trainer)
    trainer.remove_callback(weights)
    callback = Held(trainer)
    trainer.add_callback(callback)
    trainer.train()
    elements = [whole(parameter).numel() for parameter in trainer.critic.parameters()]
    return {**callback.figures, "elements": sum(elements)}


def best(folder: Path, chosen: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The critic after the step that was best, at the end of the training, and as it was saved then."""
    score = {"metric_for_best_model": "score", "load_best_model_at_end": True, "rows": 3}
    steps = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options = {"critic": "given", "played": True, "max_steps": 3, **options}
    trainer, weights = build(folder, {**chosen, **score, **steps, **options})
    split_all(trainer)
    evaluate = trainer.evaluate

    def worse_and_worse(*args: Any, **kwargs: Any) -> dict[str, float]:
        return {**evaluate(*args, **kwargs), "eval_score": -float(trainer.state.global_step)}

    trainer.evaluate = worse_and_worse
    trainer.train()
    trainer.save_model(str(folder / "final"))
    trainer.accelerator.wait_for_everyone()
    names = [name for name, _ in trainer.critic.model.named_parameters()]
    trained = {n for n, p in trainer.critic.model.named_parameters() if p.requires_grad}
    own = folder / "final" / CRITIC_FOLDER
    adapter = own / "value_model" / "adapter_model.safetensors"
    saved = load_file(adapter if adapter.exists() else own / "model.safetensors")
    return {
        "step": trainer.state.best_global_step,
        "then": [weights.after[1][f"critic/{i}"] for i in range(len(trained))],
        "end": [weights.after[-1][f"critic/{i}"] for i in range(len(trained))],
        "last": [whole(p) for p in trainer.critic.parameters()],
        "names": [name for name in names if name in trained],
        "saved": saved,
    }


def rounded(folder: Path, chosen: dict[str, Any]) -> dict[str, Any]:
    """The critic's values in a training in bfloat16."""
    trainer, _ = build(folder, {**chosen, "critic": wide_critic(), "bf16": True, "max_steps": 2})
    split_all(trainer)
    seen: list[Tensor] = []
    trainer.add_callback(_Watch(trainer, seen))
    trainer.train()
    return {"values": torch.cat([values.flatten() for values in seen])}


class _Watch(TrainerCallback):
    """Keeps the values of the second step's passes, when the head has moved."""

    def __init__(self, trainer: Any, seen: list[Tensor]) -> None:
        self.trainer, self.seen = trainer, seen

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            values = self.trainer.critic.values
            self.trainer.critic.values = lambda *a: self._kept(values(*a))

    def _kept(self, values: Tensor) -> Tensor:
        self.seen.append(values.detach().clone())
        return values


def outside(folder: Path, chosen: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint has of the engine, and what is said of one that has nothing of it."""
    saves = {"critic": "given", "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer, _ = build(folder, {**chosen, **saves})
    trainer.train()
    checkpoint = folder / "checkpoint-1"
    listed = sorted(n for n in read_manifest(checkpoint)["files"] if n.startswith(FOLDER))
    there = sorted(str(p.relative_to(checkpoint)) for p in (checkpoint / FOLDER).rglob("*.*"))
    trainer.accelerator.wait_for_everyone()
    if trainer.accelerator.is_main_process:
        (checkpoint / FOLDER).rename(folder / "elsewhere")
    trainer.accelerator.wait_for_everyone()
    try:
        trainer._optimizers.critic.load(checkpoint)
    except CheckpointError as error:
        return {"error": str(error), "listed": listed, "there": there}
    return {"error": ""}


def best_lora(folder: Path, chosen: dict[str, Any]) -> dict[str, Any]:
    """The same of a critic with adapters."""
    torch.manual_seed(0)
    model = get_peft_model(wide_critic(), LoraConfig(**{**LORA, "task_type": "SEQ_CLS"}))
    return best(folder, chosen, critic=model, lora=True)


JOBS = {job.__name__.replace("_", " "): job for job in (held, best, best_lora, rounded, outside)}


def main() -> None:
    folder, *engines = Path(sys.argv[1]), *sys.argv[2:]
    results: dict[str, Any] = {}
    for name in engines:
        for kind, job in JOBS.items():
            with engine(name, "bf16" if kind == "rounded" else "no") as chosen:
                results[f"{name} {kind}"] = job(folder / name / kind, chosen)
            gc.collect()
    torch.save(results, folder / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
