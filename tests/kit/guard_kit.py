"""Trainings whose every step is remembered, for tests of guards."""

import torch
from transformers import TrainerCallback

from tests.kit.scripted import LEARNS, Float64Trainer, scripted_trainer

RUN = {
    **LEARNS, "trainer_class": Float64Trainer, "num_ppo_epochs": 3, "max_steps": 6,
    "lr_scheduler_type": "linear", "max_grad_norm": 1.0,
}  # fmt: skip
NAN_AT = 5


class Moments(TrainerCallback):
    """Weights and the optimizer's whole state after every step."""

    def __init__(self) -> None:
        self.trainer, self.by_step = None, {}

    def on_step_end(self, args, state, control, **kwargs):
        optimizer, result = self.trainer.optimizer, {}
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                result[f"{g}/{i}"] = parameter.detach().clone()
                for name, value in optimizer.state[parameter].items():
                    result[f"{g}/{i}/{name}"] = torch.as_tensor(value).clone()
        self.by_step[state.global_step] = result


def build(folder, poison=None, steps=(NAN_AT,), **options):
    """A trainer whose mini-batches are poisoned at some steps, and what it leaves after each step."""
    moments = Moments()
    trainer, _ = scripted_trainer(folder, callbacks=[moments], **{**RUN, **options})
    moments.trainer = trainer
    if poison is not None:
        poison(trainer, lambda: trainer.state.global_step + 1 in steps)
    return trainer, moments


def run(folder, poison=None, steps=(NAN_AT,), **options):
    trainer, moments = build(folder, poison, steps, **options)
    trainer.train()
    return trainer, moments


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
