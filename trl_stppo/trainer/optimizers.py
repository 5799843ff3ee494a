"""Optimizers of policy and critic: a common optimizer, or two if gradients are sharded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainerCallback

from ..models.critic import Critic, SeparateCritic, SharedCritic
from .engine import engine_of
from .ppo_config import PPOConfig
from .sharding import critics, runtime
from .sharding.runtime import CriticOptimizer
from .stabilizers import check_linear
from .step import Step, set_base_rate

logger = logging.getLogger(__name__)

# A parameter group of an optimizer: parameters and their settings.
Group = dict[str, Any]
# Settings of a group that a resumed run may change, besides the learning rate.
CHANGEABLE = ("weight_decay", "betas", "eps")


class Optimizers(TrainerCallback):
    """The optimizers and their groups; `decayed_names` names parameters with weight decay."""

    def __init__(
        self,
        args: PPOConfig,
        accelerator: Accelerator,
        critic: Critic,
        step: Step,
        decayed_names: Callable[[nn.Module], list[str]],
    ) -> None:
        self._args, self._accelerator, self._critic = args, accelerator, critic
        self._step, self._decayed_names = step, decayed_names
        self._engine = engine_of(accelerator)
        self.critic: CriticOptimizer | None = None
        # The settings with which the groups were made, because a checkpoint overwrites them.
        self._made: list[Group] = []
        self._made_critic: list[Group] = []

    def create(self, wrapped: Callable[[], Optimizer], scheduler: LRScheduler | None) -> Optimizer:
        """Add critic and hooks to upstream's optimizer; `scheduler` is the caller's, or None."""
        parameters = self._critic.parameters()
        # A shared critic's adapter stays out of upstream's groups while it needs no gradient.
        for parameter in parameters:
            parameter.requires_grad_(False)
        optimizer = wrapped()
        for parameter in parameters:
            parameter.requires_grad_(True)
        if not self._made:
            # All refusals come before anything is attached, so the caller has only to drop the optimizer.
            if self._args.scales_step:
                check_linear(type(optimizer).__name__)
                check_apart(optimizer, parameters)
            if not self._engine.shards:
                self._add_critic_groups(optimizer, parameters, scheduler)
            self._step.attach(optimizer)
            self._made = self._settings(optimizer)
        return optimizer

    def take_critic_out(
        self,
        policy: nn.Module,
        optimizer: Any,
        kind: Callable[..., Optimizer],
        options: dict[str, Any],
    ) -> None:
        """Make a separate optimizer for the critic, of the policy's kind, if gradients are sharded."""
        if not self._engine.shards:
            return
        args = self._args
        options["lr"] = args.critic_learning_rate

        def make(parameters: Sequence[nn.Parameter]) -> Optimizer:
            made: Optimizer = kind(self._critic_groups(parameters), **options)
            return made

        def rate() -> float | Tensor:
            """Return the critic's learning rate, scheduled like the policy's."""
            assert args.critic_learning_rate is not None
            group = optimizer.param_groups[0]
            start = group.get("initial_lr", args.learning_rate)
            return args.critic_learning_rate * (group["lr"] / start if start else 1.0)

        self._step.critic_grads, self.critic = critics.prepare(
            self._critic, policy, self._accelerator, make, rate
        )
        self._made_critic = self._settings(self.critic.optimizer)

    def _settings(self, optimizer: Optimizer) -> list[Group]:
        """Return the settings of an optimizer's groups, without groups that DeepSpeed drops."""
        groups = optimizer.param_groups
        for group in groups:
            # Not every scheduler keeps the first rate.
            group.setdefault("initial_lr", group["lr"])
        kept = [g for g in groups if g["params"] or not self._engine.steps_in_backward]
        return [{n: g[n] for n in (*CHANGEABLE, "initial_lr") if n in g} for g in kept]

    def renew(self, optimizer: Optimizer, scheduler: object) -> None:
        """Write this run's settings into the groups that a checkpoint has overwritten with its own."""
        groups = optimizer.param_groups
        # An engine may have grouped the parameters anew.
        same = len(groups) == len(self._made)
        pairs = [*zip(groups, self._made, strict=True)] if same else []
        for index, (group, made) in enumerate(pairs):
            before, rate = float(group["initial_lr"]), float(made["initial_lr"])
            if before != rate:
                set_base_rate(scheduler, group, index, before, rate)
        if self.critic is not None:
            # The critic's optimizer has no scheduler: it reads its rate at each step.
            pairs += zip(self.critic.optimizer.param_groups, self._made_critic, strict=True)
        for group, made in pairs:
            group.update({name: made[name] for name in CHANGEABLE if name in made})

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Context manager around upstream's wrapping of the policy, for sharded runs."""
        accelerator, critic = self._accelerator, self._critic
        if not self._engine.shards:
            yield
            return
        if self._made:
            raise ValueError(
                f"`train()` was called a second time: {self._engine.name} wraps a policy only once."
            )
        # DeepSpeed casts all parameters of the policy's module, a shared critic's adapter included.
        casts = self._engine.steps_in_backward and isinstance(critic, SharedCritic)
        inside = critic.parameters() if casts else []
        before = [(parameter, parameter.detach().clone()) for parameter in inside]
        yield
        for parameter, value in before:
            parameter.data = value.to(parameter.device)
        if self._engine.steps_in_backward:
            runtime.pass_over_empty_steps(accelerator.deepspeed_engine_wrapped)

    def on_pre_optimizer_step(self, *_: object, **kwargs: object) -> None:
        """Step the critic's optimizer with the gradient that the guards have accepted."""
        if self.critic is not None:
            self.critic.step()

    def _decaying(self, module: nn.Module) -> set[int]:
        """Return the ids of a module's parameters that have weight decay."""
        names = set(self._decayed_names(module))
        return {id(p) for name, p in module.named_parameters() if name in names}

    def _add_critic_groups(
        self, optimizer: Optimizer, parameters: list[nn.Parameter], scheduler: LRScheduler | None
    ) -> None:
        """Add the critic's parameters to an optimizer that lacks them."""
        check_optimizer(optimizer)
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [p for p in parameters if id(p) not in known]
        if not missing:
            return
        if len(missing) < len(parameters):
            raise ValueError(
                f"`optimizers` is without {len(missing)} of the critic's {len(parameters)} parameters."
            )
        if scheduler is not None:
            raise ValueError(
                "`optimizers` has a scheduler for an optimizer without the critic; "
                "allowed: (optimizer, None)."
            )
        for group in self._critic_groups(parameters):
            optimizer.add_param_group(group)

    def _critic_groups(self, parameters: Sequence[nn.Parameter]) -> list[Group]:
        """Split the critic's parameters into groups with and without weight decay."""
        decay, critic = self._args.weight_decay, cast(SharedCritic | SeparateCritic, self._critic)
        decays = self._decaying(critic.model) | self._decaying(critic.head)
        groups = [
            {"params": [p for p in parameters if id(p) in decays], "weight_decay": decay},
            {"params": [p for p in parameters if id(p) not in decays], "weight_decay": 0.0},
        ]
        # DeepSpeed drops empty groups; without weight decay one group is enough.
        if self._engine.steps_in_backward:
            full = {"params": list(parameters), "weight_decay": decay}
            groups = [group for group in groups if group["params"]] if decay else [full]
        return [{**group, "lr": self._args.critic_learning_rate} for group in groups]


def policy_parameters(policy: nn.Module, critic: Critic) -> list[tuple[str, nn.Parameter]]:
    """Return the policy's trained parameters with names, without the parameters of a shared critic."""
    others = {id(parameter) for parameter in critic.parameters()}
    named = policy.named_parameters()
    return [(name, p) for name, p in named if p.requires_grad and id(p) not in others]


def check_apart(optimizer: Optimizer, critic: Sequence[nn.Parameter]) -> None:
    """Refuse a parameter group that mixes policy and critic."""
    ids = {id(parameter) for parameter in critic}
    if any({id(p) in ids for p in group["params"]} == {True, False} for group in optimizer.param_groups):
        raise ValueError(
            "`optimizers` has critic and policy in one group; `stabilizers` scale the policy's steps alone."
        )


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that would fail after the first rollout, or ignore its learning rate."""
    name = type(optimizer).__name__
    settings: Any = getattr(optimizer, "args", None)
    if getattr(settings, "optim_bits", 32) == 8:
        smallest = settings.min_8bit_size
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.device.type == "cpu" and parameter.numel() >= smallest:
                raise ValueError(
                    f"`optim` makes {name} with 8-bit state, which bitsandbytes keeps on a GPU only. On the "
                    f"CPU use 'adamw_torch', or a 32-bit one ('paged_adamw_32bit', 'lion_32bit')."
                )
    if any(group["lr"] is None for group in optimizer.param_groups):
        raise ValueError(
            f"`optimizers` has a {name} that sets its own learning rate (lr=None). Give it one: for "
            f"Adafactor lr=1e-5, relative_step=False, scale_parameter=False."
        )
