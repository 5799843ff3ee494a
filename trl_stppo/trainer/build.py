"""The models and optimizer groups beside the policy: reference, critic, stop token."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..models.critic import (
    Critic,
    SeparateCritic,
    SharedCritic,
    critic_from_checkpoint,
    critic_from_policy,
)
from ._trl import SyncRefModelCallback, disable_dropout_in_model, prepare_reference
from .ppo_config import PPOConfig

if TYPE_CHECKING:
    from .ppo_trainer import PPOTrainer


def check_engine(trainer: PPOTrainer) -> None:
    """Refuse ways to run on which gradients or generation would go wrong without a word."""
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError(
            "DeepSpeed and FSDP are not supported yet: they shard or step gradients before the critic's "
            "and the clipping bias are known. Use one process, or plain DDP (accelerate launch "
            "--multi_gpu), with LoRA or QLoRA where memory is short."
        )


@dataclass
class ReferencePlan:
    """Where the reference policy comes from: upstream, `model`, or nowhere."""

    by_upstream: bool = False
    model: Any = None


def plan_reference(args: PPOConfig, model: Any, ref_model: Any, peft_config: Any) -> ReferencePlan:
    """Decide who makes the reference; it is needed for either KL.

    GRPOTrainer makes it for PEFT policies (adapter off, or a frozen copy of the initial adapter) and
    for policies given by name. A policy given as an instance is copied as it is now, because its
    weights need not be those of the checkpoint that its config names.
    """
    if args.kl_coef == 0.0 and args.beta == 0.0:
        return ReferencePlan()
    if ref_model is not None:
        return ReferencePlan(model=ref_model)
    is_peft = peft_config is not None or hasattr(model, "peft_config")
    if isinstance(model, str) or is_peft:
        return ReferencePlan(by_upstream=True)
    return ReferencePlan(model=copy.deepcopy(model))


def install_reference(trainer: PPOTrainer, plan: ReferencePlan) -> None:
    """Put a reference that is not upstream's where GRPOTrainer looks for it."""
    if plan.model is None:
        return
    args = trainer.args
    reference = prepare_reference(plan.model, temperature=trainer.temperature, args=args)
    trainer.ref_model = trainer.accelerator.prepare_model(reference, evaluation_mode=True)
    trainer.beta = 1.0  # upstream's sign that reference logprobs are wanted
    if args.sync_ref_model:
        trainer.add_callback(
            SyncRefModelCallback(ref_model=trainer.ref_model, accelerator=trainer.accelerator)
        )


# ----------------------------------------------------------------------- critic


def build_critic(trainer: PPOTrainer, value_model: Any) -> Critic:
    """The critic that the arguments ask for, on the device, equal on all processes.

    A given `value_model`, else the checkpoint named in the configuration, else an adapter on a LoRA
    policy's backbone, else a second backbone with the policy's weights.
    """
    args, policy = trainer.args, trainer.model
    if value_model is not None and args.value_model_name_or_path is not None:
        raise ValueError("`value_model` and `value_model_name_or_path` were both given; pass one.")
    is_peft = hasattr(policy, "peft_config")
    if args.critic_lora_r is not None and (
        not is_peft or value_model is not None or args.value_model_name_or_path is not None
    ):
        raise ValueError(
            "`critic_lora_r` is the rank of the shared critic's adapter, but the critic is separate "
            "here. Leave it unset, or use a LoRA policy without a value model."
        )
    critic: Critic
    if value_model is not None:
        critic = _separate(value_model, trainer)
    elif args.value_model_name_or_path is not None:
        kwargs = dict(args.model_init_kwargs or {})
        critic = _separate(critic_from_checkpoint(args.value_model_name_or_path, **kwargs), trainer)
    elif is_peft:
        critic = SharedCritic(policy, args.critic_lora_r)
        # The critic's forward bypasses DDP's; its gradients are reduced by us.
        policy._ddp_params_and_buffers_to_ignore = list(critic.parameter_names)
        if args.disable_dropout:
            disable_dropout_in_model(policy)
    else:
        critic = _separate(critic_from_policy(policy), trainer)
    if trainer.accelerator.num_processes > 1:
        for parameter in critic.parameters():
            torch.distributed.broadcast(parameter.data, src=0)
    return critic


def keep_trainable(model: nn.Module) -> None:
    """Keep 4-bit weights on the CPU in the form that gradients can pass through.

    bitsandbytes repacks them, for speed, in the first forward pass in evaluation mode, be it a
    rollout's or an evaluation's, and after that training fails.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 (a Tensor to mypy)


def _separate(model: Any, trainer: PPOTrainer) -> SeparateCritic:
    args = trainer.args
    keep_trainable(model)
    if args.disable_dropout:
        disable_dropout_in_model(model)
    if args.gradient_checkpointing:
        kwargs = {"use_reentrant": False, **(args.gradient_checkpointing_kwargs or {})}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        if hasattr(model, "peft_config"):
            model.enable_input_require_grads()
    if not getattr(model, "is_quantized", False):
        model.to(trainer.accelerator.device)
    model.train()  # otherwise checkpointing stays off; dropout has been disabled above
    return SeparateCritic(model)


def add_critic_group(
    optimizer: torch.optim.Optimizer,
    parameters: list[nn.Parameter],
    args: PPOConfig,
    scheduler: Any,
) -> None:
    """Add the critic to the optimizer, unless the caller's optimizer already trains it."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [p for p in parameters if id(p) not in known]
    if not missing:
        return
    if len(missing) < len(parameters):
        raise ValueError(
            f"`optimizers` trains {len(parameters) - len(missing)} of the critic's {len(parameters)} "
            f"parameters. Give it all of them, or none: then a group is added."
        )
    if scheduler is not None:
        raise ValueError(
            "`optimizers` has a scheduler made for an optimizer without the critic. Pass "
            "(optimizer, None), or an optimizer that holds the critic's parameters too."
        )
    optimizer.add_param_group(
        {"params": missing, "lr": args.critic_learning_rate, "weight_decay": args.weight_decay}
    )


def install_stop_token(trainer: PPOTrainer) -> None:
    """Let one more id end a turn."""
    extra = trainer.args.stop_token_id
    if extra is None or extra in trainer.eos_token_ids:
        return
    trainer.eos_token_ids = [*trainer.eos_token_ids, extra]
    trainer.generation_kwargs["eos_token_id"] = trainer.eos_token_ids
    trainer.generation_config.eos_token_id = trainer.eos_token_ids
