"""One scripted rollout as a single micro-batch, its loss, and the gradient of each part."""

from typing import Any

import torch
from torch import Tensor

from tests.kit.scripted import numbered_rows, policy_parameters, scripted_trainer
from trl_stppo import STPPOTrainer

Batch = dict[str, Any]


def captured(folder: Any, **options: Any) -> tuple[STPPOTrainer, Batch]:
    """A trainer and the batch of its first rollout: one mini-batch of one micro-batch."""
    options = {"variant": "ppo", "num_ppo_epochs": 2, "max_completion_length": 64, **options}
    trainer, _ = scripted_trainer(folder, **options)
    trainer.model.train()
    return trainer, trainer._generate_and_score_completions(list(numbered_rows()))


def gradient(trainer: STPPOTrainer, loss: Tensor) -> Tensor:
    """Of a loss with respect to the policy, as one vector."""
    parameters = list(policy_parameters(trainer).values())
    grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in grads])


def loss_and_gradient(trainer: STPPOTrainer, batch: Batch) -> tuple[Tensor, Tensor]:
    """The policy's: the critic's loss is detached, and subtracted here."""
    trainer._loop.mini_batch = trainer._loop.open_mini_batch([batch])
    loss = trainer._compute_loss(trainer.model, batch)
    value = loss - trainer.args.vf_coef * trainer._loop.value_loss(batch)
    trainer._optimizer_step.critic_grads.clear()
    return value.detach(), gradient(trainer, loss)


def value_loss_and_gradient(trainer: STPPOTrainer, batch: Batch) -> tuple[Tensor, Tensor]:
    """The critic's."""
    trainer._loop.mini_batch = trainer._loop.open_mini_batch([batch])
    loss = trainer._loop.value_loss(batch)
    grads = [torch.zeros_like(p) for p in trainer.critic.parameters()]
    kept = trainer._optimizer_step.critic_grads._grads
    flat = torch.cat([(z if g is None else g).flatten() for z, g in zip(grads, kept, strict=True)])
    trainer._optimizer_step.critic_grads.clear()
    return loss, flat
