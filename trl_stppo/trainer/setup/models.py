"""Set-up of reference policy, critic and stop token."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import PeftConfig
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import find_adapter_config_file

from ...hub.loading import base_of, critic_folder, load_processor, policy_folder, with_adapter
from ...models import adapters
from ...models.adapters import CRITIC, SPLIT_INITS
from ...models.critic import HEAD_FILE, Critic, SeparateCritic, SharedCritic
from ...models.critic_models import critic_from_checkpoint, critic_from_policy
from ...paths import CRITIC_FOLDER, check_name
from .._trl import SyncRefModelCallback, add_fused_lm_head, create_model_from_path, disable_dropout
from ..bridge import Bridge
from ..engine import engine_of
from ..ppo_config import PPOConfig
from ..sharding import checks, runtime


def loading_options(args: PPOConfig) -> dict[str, Any]:
    """Return options to load checkpoints; a repository's code runs only with `trust_remote_code`."""
    return {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}


def policy_to_go_on_with(
    model: str | PreTrainedModel,
    processing_class: PreTrainedTokenizerBase | None,
    args: PPOConfig,
    quantization_config: BitsAndBytesConfig | None,
    peft_config: PeftConfig | None = None,
) -> tuple[str | PreTrainedModel, PreTrainedTokenizerBase | None, BitsAndBytesConfig | None]:
    """Load the policy if `model` names an adapter; return model, tokenizer and quantisation config."""
    kwargs = loading_options(args)
    revision, token = kwargs.pop("revision", None), kwargs.get("token")
    if not isinstance(model, str) or find_adapter_config_file(model, revision=revision, token=token) is None:
        return model, processing_class, quantization_config
    if peft_config is not None:
        raise ValueError(
            f"`peft_config` (`use_peft=True` among the flags) was given, but {model!r} holds an adapter "
            f"already. Leave it out, or pass the base model as `model`."
        )
    folder = policy_folder(model, revision, token)
    base, base_revision = base_of(folder)
    if quantization_config is not None:
        kwargs["quantization_config"] = quantization_config
    if args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
        kwargs["device_map"] = None
    policy = create_model_from_path(base, revision=base_revision, **kwargs)
    if processing_class is None:
        trust = kwargs["trust_remote_code"]
        processing_class = load_processor(folder, trust_remote_code=trust)
        text = getattr(processing_class, "tokenizer", processing_class)
        text.pad_token = text.pad_token or text.eos_token
    return with_adapter(policy, folder, trainable=True), processing_class, None


@dataclass(frozen=True)
class GivenCritic:
    """The critic's source: a model, a checkpoint's name, or the folder of a published shared critic."""

    model: PreTrainedModel | None = None
    name: str | None = None
    shared: Path | None = None


def critic_to_go_on_with(
    value_model: str | PreTrainedModel | None, args: PPOConfig, has_critic: bool
) -> GivenCritic:
    """Resolve the critic's source; the name of a published agent means the critic saved with its policy."""
    if not has_critic or not isinstance(value_model, str):
        return GivenCritic(value_model)
    check_name("value_model", value_model)
    kwargs = loading_options(args)
    folder = critic_folder(value_model, CRITIC_FOLDER, kwargs.get("revision"), kwargs.get("token"))
    if folder is None:
        return GivenCritic(name=value_model)
    if (folder / HEAD_FILE).is_file():
        return GivenCritic(shared=folder)
    return GivenCritic(name=str(folder))


def shared_critic(policy: PreTrainedModel, folder: Path) -> SharedCritic:
    """Load a published critic's adapter and head onto a policy's backbone."""
    if not hasattr(policy, "peft_config"):
        raise ValueError(
            f"The critic in `{folder}` is an adapter on the backbone of a LoRA policy, but the policy "
            f"here has none. Pass the repository as `model` too, or a `peft_config`."
        )
    config = PeftConfig.from_pretrained(str(folder))
    initial, config.inference_mode = config.init_lora_weights, False
    # The adapter's weights are loaded below, so its initialisation must not change the base again.
    config.init_lora_weights = True
    policy.add_adapter(CRITIC, config)
    if initial in SPLIT_INITS:
        policy.peft_config[CRITIC].init_lora_weights = initial
    critic = SharedCritic(policy)
    critic.load(folder)
    return critic


def check_sharding(host: Bridge, given: GivenCritic, reference: ReferencePlan) -> None:
    """Refuse engines and settings with which a training would be wrong without an error."""
    lora = hasattr(host.model, "peft_config")
    critic = "shared" if lora else "copied"
    if given.model is not None:
        critic = "given"
    elif given.name is not None:
        critic = "named"
    checks.check(host, critic if host.has_critic else None, copies_adapter=reference.adapter)
    if lora:
        adapters.check_loaded_policy(host.model)


@dataclass
class ReferencePlan:
    """The source of the reference policy: upstream, `model`, a copy of the adapter, or none."""

    by_upstream: bool = False
    model: PreTrainedModel | None = None
    adapter: bool = False


def plan_reference(
    args: PPOConfig, model: Any, ref_model: PreTrainedModel | None, peft_config: PeftConfig | None
) -> ReferencePlan:
    """Decide the source of the reference policy, which a KL in the reward or in the loss needs.

    GRPOTrainer makes the reference of a policy given by name, and switches a fresh adapter off. We copy an
    adapter that changes the output from the start, because upstream does not copy an embedding's adapter and
    lets initialisations such as PiSSA rewrite the base weights again. We copy a policy given as an instance,
    because its weights may differ from the checkpoint that its config names.
    """
    adapters.check_policy_adapter(model, peft_config)
    if args.kl_coef == 0.0 and args.beta == 0.0:
        return ReferencePlan()
    is_peft = peft_config is not None or hasattr(model, "peft_config")
    if args.sync_ref_model and is_peft:
        raise ValueError("`sync_ref_model=True` is not supported with adapters.")
    if ref_model is not None:
        return ReferencePlan(model=ref_model)
    if not is_peft:
        if isinstance(model, str):
            return ReferencePlan(by_upstream=True)
        if any(map(runtime.is_in_pieces, model.parameters())):
            raise ValueError("A policy sharded by ZeRO-3 cannot be copied: pass its name, or `ref_model`.")
        return ReferencePlan(model=copy.deepcopy(model))
    config = model.peft_config[adapters.POLICY] if peft_config is None else peft_config
    adapters.check_untouched_base(
        config, "the reference", "pass `ref_model`, or set kl_coef=0.0 and beta=0.0"
    )
    if adapters.needs_reference_copy(model, peft_config):
        return ReferencePlan(adapter=True)
    return ReferencePlan(by_upstream=True)


def install_models(host: Bridge, reference: ReferencePlan, given: GivenCritic) -> Critic:
    """Install the reference policy on GRPOTrainer; build and return the critic."""
    keep_trainable(host.model)
    install_reference(host, reference)
    for model in (host.model, host.ref_model):
        if model is None:
            continue
        if host.args.disable_dropout:
            disable_dropout(model)
        config: Any = getattr(model, "config", None)
        if getattr(config, "output_router_logits", False):
            # Only the loss needs router logits, and it requests them itself.
            config.output_router_logits = False
    # Fail now if the generation configuration cannot be saved. An adapter's checkpoints have none.
    if not hasattr(host.model, "peft_config"):
        with TemporaryDirectory() as folder:
            host.model.generation_config.save_pretrained(folder)
    return build_critic(host, given)


def install_reference(host: Bridge, plan: ReferencePlan) -> None:
    """Install a planned adapter copy or model as GRPOTrainer's reference policy."""
    if plan.adapter:
        adapters.add_reference_adapter(host.model)
        return
    if plan.model is None:
        return
    args, reference = host.args, plan.model
    reference.requires_grad_(False)
    reference.eval()
    in_float32 = args.cast_lm_head_to_fp32
    add_fused_lm_head(reference, temperature=host.temperature, cast_lm_head_to_fp32=in_float32)
    host.ref_model = engine_of(host.accelerator).prepare_frozen(reference)
    if args.sync_ref_model:
        host.add_callback(SyncRefModelCallback(ref_model=host.ref_model, accelerator=host.accelerator))


def build_critic(host: Bridge, given: GivenCritic) -> Critic:
    """Build the critic on the device, equal on all processes.

    It is a given model, else a named checkpoint, else an adapter on a LoRA policy's backbone, published or
    new, else a second backbone with the policy's weights.
    """
    args, policy, value_model, published = host.args, host.model, given.model, given.shared
    if not host.has_critic and value_model is not None:
        raise ValueError(
            f"`value_model` is a {type(value_model).__name__}, but {type(args).__name__} has no critic."
        )
    is_peft = hasattr(policy, "peft_config")
    if is_peft:
        adapters.restore_module_dtypes(policy)
        adapters.load_in_place(policy)
    if not host.has_critic:
        return Critic()
    critic: Critic
    if value_model is not None:
        critic = _separate(value_model, host)
    elif given.name is not None:
        kwargs = loading_options(args)
        # ZeRO-3 cannot shard packed weights.
        packed = "quantization_config" in kwargs
        with runtime.unpartitioned() if packed else nullcontext():
            model = critic_from_checkpoint(given.name, **kwargs)
        critic = _separate(model, host)
    elif is_peft or published is not None:
        if published is None:
            critic = SharedCritic(policy)
        else:
            critic = shared_critic(policy, published)
        # An engine moves the policy only later, so move the critic's head here.
        critic.head.to(host.accelerator.device)
        # DDP ignores the critic, because its forward pass bypasses DDP's; we reduce its gradients.
        policy._ddp_params_and_buffers_to_ignore = list(critic.parameter_names)
        if args.disable_dropout:
            disable_dropout(policy)
    else:
        critic = _separate(critic_from_policy(policy), host)
    if host.accelerator.num_processes > 1:
        for parameter in critic.parameters():
            if runtime.is_in_pieces(parameter):
                continue
            value = parameter.data.to(host.accelerator.device)
            torch.distributed.broadcast(value, src=0)
            parameter.data.copy_(value)
    return critic


def keep_trainable(model: nn.Module) -> None:
    """Stop bitsandbytes from repacking 4-bit CPU weights in evaluation mode, so that they stay trainable."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 (a Tensor to mypy)


def _separate(model: PreTrainedModel, host: Bridge) -> SeparateCritic:
    args = host.args
    keep_trainable(model)
    if args.disable_dropout:
        disable_dropout(model)
    if args.gradient_checkpointing:
        # Set `use_reentrant`, because upstream turns it on for a LoRA policy under ZeRO-3.
        kwargs = {**(args.gradient_checkpointing_kwargs or {}), "use_reentrant": False}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        if hasattr(model, "peft_config"):
            model.enable_input_require_grads()
    if not getattr(model, "is_quantized", False):
        engine_of(host.accelerator).place(model)
    # Gradient checkpointing is off in evaluation mode.
    model.train()
    return SeparateCritic(model)


def install_stop_token(host: Bridge) -> None:
    """Add the stop token to the ids that end a turn."""
    extra = host.args.stop_token_id
    if extra is None or extra in host.eos_token_ids:
        return
    host.eos_token_ids = [*host.eos_token_ids, extra]
    host.generation_kwargs["eos_token_id"] = host.eos_token_ids
    host.generation_config.eos_token_id = host.eos_token_ids
