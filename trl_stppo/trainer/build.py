"""What the trainers' constructor has to decide and check; one function per decision."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import ProcessorMixin

from ..models.critic import (
    Critic,
    SeparateCritic,
    SharedCritic,
    critic_from_checkpoint,
    critic_from_policy,
)
from ..rollout.chat import ChatRenderer
from ..rollout.kinds import split_environments
from ..rollout.reward_funcs import refuse_nan
from ..rollout.text_env import Limits, TextEnvRollout
from ._trl import (
    SyncRefModelCallback,
    disable_dropout_in_model,
    get_config_model_id,
    prepare_reference,
)
from .ppo_config import PPOConfig

if TYPE_CHECKING:
    from .ppo_trainer import PPOTrainer

PLACEHOLDER_PROMPT = [{"role": "user", "content": ""}]


def default_config(config_class: type[PPOConfig], model: Any, name: str) -> PPOConfig:
    """The configuration of a trainer that was given none."""
    model_id = model if isinstance(model, str) else get_config_model_id(model.config)
    return config_class(f"{model_id.split('/')[-1]}-{name}")


def check_arguments(
    args: PPOConfig,
    config_class: type[PPOConfig],
    processing_class: Any,
    data_collator: Any,
    model: Any,
    ref_model: Any,
) -> None:
    """Refuse what cannot work before anything is loaded."""
    if not isinstance(args, config_class):
        raise TypeError(
            f"`args` is a {type(args).__name__}; this trainer needs a {config_class.__name__}, which "
            f"accepts every field of GRPOConfig."
        )
    if isinstance(processing_class, ProcessorMixin):
        raise ValueError(
            f"`processing_class` is a {type(processing_class).__name__}: images are not supported. "
            f"Pass a tokenizer."
        )
    if processing_class is not None and processing_class.pad_token is None:
        raise ValueError(
            "`processing_class` has no pad token, and episodes of different lengths need one. Set it "
            "before building the trainer, for example `tokenizer.pad_token = tokenizer.eos_token`."
        )
    if data_collator is not None and not hasattr(data_collator, "tokenizer"):
        raise ValueError(
            f"`data_collator` is a {type(data_collator).__name__}, but rows are collated after the "
            f"rollout. Only padding collators (DataCollatorWithPadding) are accepted, and have nothing "
            f"to do; change the dataset instead."
        )
    if ref_model is not None and ref_model is model:
        raise ValueError(
            "`ref_model` and `model` are the same object, so the reference would be trained along. "
            "Pass a copy, or leave ref_model unset: a copy is made."
        )


# ---------------------------------------------------------------------- rollout


@dataclass
class RolloutPlan:
    """Who plays the episodes.

    Attributes:
        text: our loop for text environments, or None.
        user_func: the caller's rollout_func, or None.
        func: what GRPOTrainer gets as rollout_func.
        tool_environments: what GRPOTrainer gets as environment_factory.
    """

    text: TextEnvRollout | None = None
    user_func: Callable[..., dict[str, Any]] | None = None
    func: Callable[..., dict[str, Any]] | None = None
    tool_environments: Any = None


def plan_rollout(
    args: PPOConfig, environment_factory: Any, rollout_func: Any, trainer: PPOTrainer
) -> RolloutPlan:
    """Route each kind of environment to the loop that plays it."""
    text, tools = split_environments(environment_factory)
    if text is not None:
        if rollout_func is not None:
            raise ValueError(
                "`rollout_func` and a text `environment_factory` were both given, and each plays the "
                "whole episode. Pass one of them."
            )
        limits = Limits(args.max_turns, args.max_turn_tokens, args.max_completion_length)
        return RolloutPlan(text=TextEnvRollout(text, limits), func=trainer._run_text_environments)
    if args.max_turns is not None or args.max_turn_tokens is not None:
        raise ValueError(
            "`max_turns` and `max_turn_tokens` act on text environments only. For tools set "
            "max_tool_calling_iterations; a rollout_func keeps its own limits."
        )
    if rollout_func is not None:
        return RolloutPlan(
            user_func=rollout_func, func=trainer._run_user_rollout, tool_environments=tools
        )
    return RolloutPlan(tool_environments=tools)


@contextmanager
def without_own_warning(plan: RolloutPlan) -> Iterator[None]:
    """Hide TRL's warning about `rollout_func` where it is ours, which the user cannot act on."""
    with warnings.catch_warnings():
        if plan.text is not None:
            warnings.filterwarnings("ignore", message="You are using 'rollout_func'")
        yield


def check_dataset(dataset: Any, args: PPOConfig, rollout: RolloutPlan) -> Any:
    """Refuse datasets that would fail late or never start; make one for environments with data."""
    from datasets import Dataset

    if dataset is None:
        if rollout.text is None:
            return None  # GRPOTrainer decides, and explains
        if args.max_steps <= 0:
            raise ValueError(
                "Without `train_dataset` the environment supplies the tasks, and the length of the "
                "training is unknown: set `max_steps` or `total_episodes`."
            )
        rows = args.generation_batch_size // args.num_generations
        return Dataset.from_dict({"prompt": [PLACEHOLDER_PROMPT] * rows})
    if not isinstance(dataset, Dataset):
        return dataset  # streams have no length; GRPOTrainer checks the type
    if len(dataset) == 0:
        raise ValueError("`train_dataset` is empty. Check its split and filters.")
    owns_prompt = rollout.text is not None or rollout.tool_environments is not None
    if not owns_prompt and not {"prompt", "input_ids"} & set(dataset.column_names):
        raise ValueError(
            f"`train_dataset` has the columns {dataset.column_names}, but neither `prompt` (a string or "
            f"a list of messages) nor `input_ids` (token ids). Rename or map one of them."
        )
    needed = args.generation_batch_size // args.num_generations
    if len(dataset) < needed:
        raise ValueError(
            f"`train_dataset` has {len(dataset)} rows, fewer than the {needed} prompts of one rollout "
            f"batch, so training would never start. Lower per_device_train_batch_size or "
            f"gradient_accumulation_steps, or add rows."
        )
    return dataset


def rows_with_prompts(
    rows: list[dict[str, Any]], tokenizer: Any, rollout: RolloutPlan
) -> tuple[list[dict[str, Any]], list[list[int]] | None]:
    """Rows as GRPOTrainer reads them, each with a `prompt`; the dataset's own are not changed.

    Returns:
        The rows, and for pre-tokenised ones their exact prompt ids, otherwise None.
    """
    pretokenized = "prompt" not in rows[0] and "input_ids" in rows[0]
    if pretokenized:
        ids = [unpadded(row, tokenizer.pad_token_id) for row in rows]
        texts = [tokenizer.decode(i) for i in ids]
        return [{**row, "prompt": t} for row, t in zip(rows, texts, strict=True)], ids
    if rollout.text is not None:
        return [{"prompt": list(PLACEHOLDER_PROMPT), **row} for row in rows], None
    return [dict(row) for row in rows], None


def unpadded(row: dict[str, Any], pad_token_id: int) -> list[int]:
    """Ids of a pre-tokenised prompt without its left padding."""
    ids = [int(i) for i in row["input_ids"]]
    if row.get("attention_mask") is not None:
        return [i for i, keep in zip(ids, row["attention_mask"], strict=True) if keep]
    start = 0
    while start < len(ids) - 1 and ids[start] == pad_token_id:
        start += 1
    return ids[start:]


def renderer(trainer: PPOTrainer) -> ChatRenderer:
    """The renderer for the trainer's tokenizer and template."""
    return ChatRenderer(
        trainer._tokenizer,
        trainer.eos_token_ids,
        chat_template=trainer.chat_template,
        template_kwargs=trainer.chat_template_kwargs,
    )


# ---------------------------------------------------------------------- rewards


@dataclass
class RewardPlan:
    """Reward functions as GRPOTrainer gets them.

    Attributes:
        repeated: index of the function that repeats what the turns have earned, for the log and to
            satisfy GRPOTrainer's demand for at least one; not added to the score.
    """

    funcs: list[Any] = field(default_factory=list)
    processing_classes: list[Any] = field(default_factory=list)
    repeated: int | None = None

    @contextmanager
    def extended_weights(self, args: PPOConfig) -> Iterator[None]:
        """Give the functions we added a weight of one, where the caller set weights."""
        given = args.reward_weights
        if given is not None:
            args.reward_weights = [*given, *[1.0] * (len(self.funcs) - len(given))]
        try:
            yield
        finally:
            args.reward_weights = given


def plan_rewards(
    args: PPOConfig,
    reward_funcs: Any,
    processing_classes: Any,
    reward_model: Any,
    tokenizer: Any,
    rollout: RolloutPlan,
    trainer: PPOTrainer,
) -> RewardPlan:
    """Collect every source of reward in GRPOTrainer's form."""
    funcs = [] if reward_funcs is None else reward_funcs
    funcs = list(funcs) if isinstance(funcs, list | tuple) else [funcs]
    classes = processing_classes if isinstance(processing_classes, list) else [processing_classes]
    classes = [None] * len(funcs) if processing_classes is None else list(classes)
    if args.reward_weights is not None and len(args.reward_weights) != len(funcs):
        raise ValueError(
            f"`reward_weights` has {len(args.reward_weights)} entries for {len(funcs)} reward "
            f"functions; give one each (reward_model and environments count with weight 1)."
        )
    if reward_model is not None:
        funcs.append(reward_model)
        classes.append(tokenizer)
    plan = RewardPlan([refuse_nan(func) for func in funcs], classes)
    if rollout.text is not None or (rollout.user_func is not None and not funcs):
        plan.repeated = len(plan.funcs)
        plan.funcs.append(_turn_reward_sum(trainer))
        plan.processing_classes.append(None)
    return plan


def _turn_reward_sum(trainer: PPOTrainer) -> Callable[..., list[float]]:
    """A reward function that reports what the turns of each episode have earned."""

    def turn_rewards(completions: list[Any], **kwargs: Any) -> list[float]:
        recorded = trainer._record.turn_rewards
        if recorded is None:
            raise ValueError(
                "`rollout_func` returned no `turn_rewards`, and there are no `reward_funcs`, so nothing "
                "could be learned. Return turn_rewards, or pass reward_funcs."
            )
        return [sum(rewards) for rewards in recorded]

    return turn_rewards


# -------------------------------------------------------------------- reference


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
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError(
            "A reference policy passed or copied as an instance is not sharded. Under DeepSpeed or "
            "FSDP pass `model` by name, use a LoRA policy, or set kl_coef=0 and beta=0."
        )
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


def _separate(model: Any, trainer: PPOTrainer) -> SeparateCritic:
    args = trainer.args
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
