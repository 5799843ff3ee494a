"""Optimizers of policy and critic: a common optimizer, or two if gradients are sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ..models.critic import SeparateCritic, SharedCritic
from .bridge import Bridge
from .gradient_buffer import GradientBuffer
from .sharding import critics, runtime
from .sharding.runtime import CriticOptimizer, is_sharded, sharding_name
from .stabilizers import check_linear
from .step_scale import StepScale

# Role of a parameter group: policy or critic, with or without weight decay, or the caller's own group.
DECAYED, PLAIN, GIVEN = "decayed", "plain", "given"
CRITIC = ("critic", "plain critic")


def _hook_critic(optimizer: torch.optim.Optimizer, buffer: GradientBuffer) -> None:
    """Add hooks that add the critic's reduced and clipped gradient to `.grad` for a step."""

    def after(*_: object) -> None:
        for parameter in buffer.parameters:
            parameter.grad = None
        buffer.clear()

    optimizer.register_step_pre_hook(lambda *_: buffer.add_to_grad())
    optimizer.register_step_post_hook(after)


class Optimizers(TrainerCallback):
    """The optimizers, the critic's gradient and the hooks."""

    def __init__(self, host: Bridge, scale: StepScale) -> None:
        self._host, self._scale = host, scale
        self.critic_grads = GradientBuffer(host.critic.parameters())
        self.critic: CriticOptimizer | None = None
        self.roles: list[str] = []

    def create(
        self, wrapped: Callable[..., torch.optim.Optimizer], *args: Any, **kwargs: Any
    ) -> torch.optim.Optimizer:
        """Create upstream's optimizer, and add the critic's groups and the hooks."""
        host = self._host
        parameters, given = host.critic.parameters(), host.optimizer
        # Without gradients a shared critic's adapter stays out of upstream's groups.
        for parameter in parameters:
            parameter.requires_grad_(False)
        optimizer = wrapped(*args, **kwargs)
        for parameter in parameters:
            parameter.requires_grad_(True)
        if not self.roles:
            # All refusals come before anything is attached, so it is enough to restore the optimizer.
            try:
                roles = _policy_roles(host, optimizer, given is not None)
                self.roles = self._attach(optimizer, roles)
            except ValueError:
                host.optimizer = given
                raise
        return optimizer

    def _attach(self, optimizer: torch.optim.Optimizer, roles: list[str]) -> list[str]:
        """Check an optimizer, then attach the critic and the hooks; return the roles of its groups."""
        host, parameters, groups = self._host, self._host.critic.parameters(), None
        if host.args.scales_step:
            check_linear(type(optimizer).__name__)
        if is_sharded(host.accelerator):
            host.add_callback(self)
        else:
            groups = policy_groups(optimizer, parameters, apart=host.args.scales_step)
            if add_critic_groups(host, optimizer, parameters):
                roles += CRITIC
            _hook_critic(optimizer, self.critic_grads)
        self._scale.attach(optimizer, groups, host.model, parameters)
        return roles

    def _take_critic_out(self) -> None:
        """Make a separate optimizer for the critic, of the same kind as the policy's."""
        host, args = self._host, self._host.args
        kind, options = host.get_optimizer_cls_and_kwargs(args)
        options["lr"] = args.critic_learning_rate

        def make(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
            optimizer: torch.optim.Optimizer = kind(critic_groups(host, parameters), **options)
            return optimizer

        def rate() -> float | Tensor:
            """Return the critic's learning rate, scheduled like the policy's."""
            assert host.optimizer is not None
            assert args.critic_learning_rate is not None
            group = host.optimizer.param_groups[0]
            start = group.get("initial_lr", args.learning_rate)
            return args.critic_learning_rate * (group["lr"] / start if start else 1.0)

        self.critic_grads, self.critic = critics.prepare(
            host.critic, host.model, host.accelerator, make, rate
        )

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Context manager around upstream's wrapping; then make the critic's optimizer of a sharded run."""
        host, accelerator = self._host, self._host.accelerator
        if not is_sharded(accelerator):
            yield
            return
        if self.roles:
            raise ValueError(
                f"`train()` was called a second time: {sharding_name(accelerator)} wraps a policy only once."
            )
        # DeepSpeed casts all parameters of the policy's module, a shared critic's adapter included.
        casts = host.is_deepspeed_enabled and isinstance(host.critic, SharedCritic)
        inside = host.critic.parameters() if casts else []
        before = [(parameter, parameter.detach().clone()) for parameter in inside]
        yield
        for parameter, value in before:
            parameter.data = value.to(parameter.device)
        if host.is_deepspeed_enabled:
            runtime.pass_over_empty_steps(accelerator.deepspeed_engine_wrapped)
        if host.has_critic:
            self._take_critic_out()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step the critic's optimizer with the gradient that the guards have accepted."""
        if self.critic is not None:
            self.critic.step()


def _policy_roles(host: Bridge, optimizer: torch.optim.Optimizer, is_callers: bool) -> list[str]:
    """Return the role of each of the policy's parameter groups, without groups that DeepSpeed drops."""
    decays, roles = _decaying(host, host.model), []
    for group in optimizer.param_groups:
        if not group["params"] and host.is_deepspeed_enabled:
            continue
        decayed = any(id(parameter) in decays for parameter in group["params"])
        roles.append(GIVEN if is_callers else DECAYED if decayed else PLAIN)
    return roles


def _decaying(host: Bridge, module: Any) -> set[int]:
    """Return the ids of a module's parameters that have weight decay."""
    names = set(host.get_decay_parameter_names(module))
    return {id(p) for name, p in module.named_parameters() if name in names}


def policy_parameters(host: Bridge) -> list[tuple[str, nn.Parameter]]:
    """Return the policy's trained parameters with names, without the parameters of a shared critic."""
    critic = {id(parameter) for parameter in host.critic.parameters()}
    named = host.model.named_parameters()
    return [(name, p) for name, p in named if p.requires_grad and id(p) not in critic]


def policy_groups(
    optimizer: torch.optim.Optimizer, critic: Sequence[nn.Parameter], *, apart: bool
) -> list[int]:
    """Return the indices of groups without critic parameters; if `apart`, refuse mixed groups."""
    ids = {id(parameter) for parameter in critic}
    inside = [{id(p) in ids for p in group["params"]} for group in optimizer.param_groups]
    if apart and {True, False} in inside:
        raise ValueError(
            "`optimizers` has critic and policy in one group; 'share' scales the policy alone."
        )
    return [number for number, own in enumerate(inside) if True not in own]


def add_critic_groups(
    host: Bridge, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]
) -> bool:
    """Add the critic's parameters to an optimizer that lacks them; return whether any were added."""
    check_optimizer(optimizer)
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [p for p in parameters if id(p) not in known]
    if not missing:
        return False
    if len(missing) < len(parameters):
        raise ValueError(
            f"`optimizers` is without {len(missing)} of the critic's {len(parameters)} parameters."
        )
    if host.lr_scheduler is not None:
        raise ValueError(
            "`optimizers` has a scheduler for an optimizer without the critic; allowed: (optimizer, None)."
        )
    for group in critic_groups(host, parameters):
        optimizer.add_param_group(group)
    return True


def critic_groups(host: Bridge, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Split the critic's parameters into groups with and without weight decay."""
    args, critic = host.args, cast(SharedCritic | SeparateCritic, host.critic)
    decays = _decaying(host, critic.model) | _decaying(host, critic.head)
    groups = [
        {"params": [p for p in parameters if id(p) in decays], "weight_decay": args.weight_decay},
        {"params": [p for p in parameters if id(p) not in decays], "weight_decay": 0.0},
    ]
    # DeepSpeed drops empty groups; without weight decay one group is enough.
    if host.is_deepspeed_enabled:
        full = {"params": list(parameters), "weight_decay": args.weight_decay}
        groups = [group for group in groups if group["params"]] if args.weight_decay else [full]
    return [{**group, "lr": args.critic_learning_rate} for group in groups]


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
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
