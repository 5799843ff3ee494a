"""Loading of a published policy's adapter and critic, to continue their training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import find_adapter_config_file

from ...hub.fetching import critic_folder, policy_folder
from ...hub.loading import base_of, load_tokenizer, with_adapter
from ...hub.settings import CRITIC_FOLDER
from ...models.adapter_checks import CRITIC, SPLIT_INITS
from ...models.critic import HEAD_FILE, SharedCritic
from ...paths import check_name
from .._trl import create_model_from_path
from ..ppo_config import PPOConfig


def loading_options(args: PPOConfig) -> dict[str, Any]:
    """Return options to load checkpoints; a repository's code runs only with `trust_remote_code`."""
    return {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}


def policy_to_go_on_with(
    model: Any,
    processing_class: Any,
    args: PPOConfig,
    quantization_config: Any,
    peft_config: Any = None,
) -> tuple[Any, Any, Any]:
    """Load the policy if `model` names an adapter; return model, tokenizer and quantisation config."""
    kwargs = loading_options(args)
    revision, token = kwargs.pop("revision", None), kwargs.get("token")
    named = isinstance(model, str)
    if not named or find_adapter_config_file(model, revision=revision, token=token) is None:
        given = quantization_config or kwargs.get("quantization_config")
        bits = quantised(given or getattr(model, "config", None))
        if bits and peft_config is None and not hasattr(model, "peft_config"):
            raise ValueError(
                f"`quantization_config` has {bits[0]}=True, and packed weights cannot be trained. Pass "
                f"`peft_config=LoraConfig(...)`, or leave `quantization_config` out."
            )
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
        # GRPOTrainer sets the same value.
        kwargs["device_map"] = None
    policy = create_model_from_path(base, revision=base_revision, **kwargs)
    if processing_class is None:
        trust = kwargs["trust_remote_code"]
        processing_class = load_tokenizer(folder, trust_remote_code=trust)
        if processing_class.pad_token is None:
            processing_class.pad_token = processing_class.eos_token
    return with_adapter(policy, folder, trainable=True), processing_class, None


@dataclass(frozen=True)
class GivenCritic:
    """The critic's source: a model, a checkpoint's name, or the folder of a published shared critic."""

    model: Any = None
    name: str | None = None
    shared: Path | None = None


def critic_to_go_on_with(value_model: Any, args: PPOConfig, has_critic: bool) -> GivenCritic:
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


def shared_critic(policy: Any, folder: Path) -> SharedCritic:
    """Load a published critic's adapter and head onto a policy's backbone."""
    from peft import PeftConfig

    if not hasattr(policy, "peft_config"):
        raise ValueError(
            f"The critic in `{folder}` is an adapter on the backbone of a LoRA policy, but the policy "
            f"here has none. Pass the repository as `model` too, or a `peft_config`."
        )
    config = PeftConfig.from_pretrained(str(folder))
    initial, config.inference_mode = config.init_lora_weights, False
    # The adapter's weights are loaded, so the base must not change again.
    config.init_lora_weights = True
    policy.add_adapter(CRITIC, config)
    if initial in SPLIT_INITS:
        policy.peft_config[CRITIC].init_lora_weights = initial
    critic = SharedCritic(policy)
    critic.load(folder)
    return critic


def quantised(config: Any) -> list[str]:
    """Return the bitsandbytes flags, load_in_4bit or load_in_8bit, that a configuration sets."""
    config = getattr(config, "quantization_config", config)
    ask = config.get if isinstance(config, dict) else lambda key: getattr(config, key, False)
    return [key for key in ("load_in_4bit", "load_in_8bit") if ask(key)]
