"""PEFT adapters of policy, reference and critic on one backbone: adding, switching, loading.

The policy's adapter is called `default`, as TRL and PEFT's files expect. With this adapter switched
off, the backbone is the reference. If the adapter changes the output from the start, a frozen copy, `ref`,
is the reference.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from transformers import PreTrainedModel

POLICY, REFERENCE, CRITIC = "default", "ref", "critic"
# Initialisations whose output is zero at first, so that the backbone itself is the initial policy.
NEUTRAL_INITS = (True, "gaussian", "orthogonal", "eva", "mica")
# Initialisations that move a part of the base weights into the adapter; the rest is not a working model.
SPLIT_INITS = ("pissa", "olora")

# Fields that do not work with turns, the critic's pass or a second adapter; falsy values are allowed.
REFUSED_FIELDS = (
    *("alora_invocation_tokens", "use_qalora", "monteclora_config", "arrow_config"),
    *("layer_replication", "megatron_config"),
)


def check_policy_adapter(model: str | PreTrainedModel, peft_config: PeftConfig | None) -> None:
    """Raise ValueError for an adapter that could not be trained, sampled, saved or resumed.

    `peft_config` describes an adapter that is not yet made, or is None.
    """
    config = peft_config
    if hasattr(model, "peft_config"):
        _check_given_adapters(model)
        config = model.peft_config[POLICY]
    if config is None or not hasattr(config, "peft_type"):
        # Skip an object that is no adapter configuration, because GRPOTrainer raises its own error for it.
        return
    kind = type(config).__name__
    task = getattr(config.task_type, "value", config.task_type)
    if task not in (None, "CAUSAL_LM"):
        raise ValueError(f"`task_type={task!r}` of {kind}; allowed: 'CAUSAL_LM'.")
    if config.is_prompt_learning or config.is_adaption_prompt or kind == "AdaLoraConfig":
        raise ValueError(f"`peft_config` is a {kind}, which is not supported. Use LoraConfig.")
    if peft_config is not None and config.inference_mode:
        raise ValueError(f"`inference_mode=True` of {kind}; allowed: False.")
    if not is_lora(config):
        return
    init, allowed = config.init_lora_weights, (*NEUTRAL_INITS, False, *SPLIT_INITS)
    if init not in allowed or (init == "eva" and peft_config is not None):
        raise ValueError(
            f"`init_lora_weights={init!r}` is not supported. Allowed: {', '.join(map(repr, allowed))}; "
            f"'eva' in a PeftModel on which peft.initialize_lora_eva_weights was called."
        )
    for name in REFUSED_FIELDS:
        if value := getattr(config, name, None):
            raise ValueError(f"`{name}={value!r}` is not supported. Leave it unset.")


def _check_given_adapters(model: PreTrainedModel) -> None:
    """Raise ValueError for a PeftModel whose adapter does not suit TRL and the checkpoints."""
    loaded = "PeftModel.from_pretrained(base, path, is_trainable=True)"
    if not hasattr(model, "get_base_model"):
        raise ValueError(f"`model` has an adapter loaded by transformers. Load it by {loaded}.")
    if model.active_adapters != [POLICY]:
        raise ValueError(f"`model` has {model.active_adapters} active; allowed: [{POLICY!r}].")
    if not any(p.requires_grad for n, p in model.named_parameters() if POLICY in n.split(".")):
        raise ValueError(f"The adapter {POLICY!r} of `model` is frozen. Load it by {loaded}.")


def check_loaded_policy(model: PreTrainedModel) -> None:
    """Raise ValueError for an adapter with which the base model's forward pass would fail."""
    if not hasattr(model.get_output_embeddings(), "bias"):
        raise ValueError("`trainable_token_indices` is not supported with tie_word_embeddings.")
    config = model.peft_config[model.active_adapter]
    in_8_bit = getattr(model.get_base_model(), "is_loaded_in_8bit", False)
    if getattr(config, "use_dora", False) and in_8_bit and model.device.type == "cpu":
        raise ValueError("`use_dora=True` on a base in 8 bits is not supported on the CPU.")


def check_untouched_base(config: PeftConfig, who: str, instead: str) -> None:
    """Raise ValueError if an adapter trains biases, because these change the base for all adapters."""
    if getattr(config, "bias", "none") != "none":
        raise ValueError(f"`bias={config.bias!r}` changes {who}. Allowed: 'none'; or {instead}.")


def is_lora(config: object) -> bool:
    """Return whether an adapter configuration is plain LoRA, not a variant of LoRA."""
    return getattr(config, "peft_type", None) == "LORA"


def needs_reference_copy(model: str | PreTrainedModel, peft_config: Any) -> bool:
    """Return whether the initial policy may differ from its backbone without adapters."""
    if hasattr(model, "peft_config"):
        return True
    if is_lora(peft_config):
        return peft_config.init_lora_weights not in NEUTRAL_INITS
    # Variants of LoRA have a switch, meant for tests, that starts them at random.
    switches = ("init_weights", "init_ia3_weights")
    return any(getattr(peft_config, name, True) is False for name in switches)


def add_reference_adapter(model: PreTrainedModel) -> None:
    """Add a frozen copy of the policy's adapter. GRPOTrainer switches to this copy for the reference."""
    config = _further_config(model.peft_config[POLICY])
    model.add_adapter(REFERENCE, config)
    _copy_adapter(model, POLICY, REFERENCE)
    for name, parameter in model.named_parameters():
        if REFERENCE in name.split("."):
            parameter.requires_grad_(False)


def add_critic_adapter(model: PreTrainedModel) -> None:
    """Add the critic's adapter beside the policy's, with its LoRA configuration."""
    if CRITIC in model.peft_config:
        return
    policy = model.peft_config[model.active_adapter]
    if not is_lora(policy):
        raise ValueError(
            f"A shared critic needs a LoraConfig, but `peft_config` is a {type(policy).__name__}."
        )
    check_untouched_base(policy, "the shared critic's backbone", "pass `value_model`")
    config = _further_config(policy)
    config.modules_to_save = None
    config.ensure_weight_tying = False
    model.add_adapter(CRITIC, config)
    if policy.init_lora_weights in SPLIT_INITS:
        # Copy the weights that moved out of the base, because the critic's backbone needs them too.
        _copy_adapter(model, POLICY, CRITIC)
        model.peft_config[CRITIC].init_lora_weights = policy.init_lora_weights


def _further_config(policy: PeftConfig) -> PeftConfig:
    """Copy an adapter's configuration for another adapter, without options that change the base weights."""
    config = copy.deepcopy(policy)
    config.inference_mode = False
    # PEFT allows biases in one adapter only.
    neutral = {"bias": "none", "init_lora_weights": True}
    for name, value in {**neutral, "modules_to_tie": None, "target_modules_to_tie": None}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def discard_saved_reference(folder: Path) -> None:
    """Delete the reference adapter's files from a saved model's folder."""
    saved = folder / REFERENCE
    if not (saved / "adapter_config.json").is_file():
        return
    weights = ("adapter_model.safetensors", "adapter_model.bin")
    for name in ("adapter_config.json", *weights, "README.md"):
        (saved / name).unlink(missing_ok=True)
    if not any(saved.iterdir()):
        saved.rmdir()


def _copy_adapter(model: PreTrainedModel, source: str, target: str) -> None:
    """Copy the values and dtypes of the adapter `source` to the adapter `target`."""
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if source in parts:
            twin = ".".join(target if part == source else part for part in parts)
            try:
                copied = model.get_parameter(twin)
            except AttributeError:
                # The target adapter lacks this part, for example modules_to_save.
                continue
            copied.data = parameter.detach().clone()


@contextmanager
def only_active(layers: list[Any], adapter: str) -> Iterator[None]:
    """Context manager in which only `adapter` is active in `layers`. It does not change `requires_grad`.

    A layer without that adapter uses its base weights.
    """
    previous = [layer._active_adapter for layer in layers]
    for layer in layers:
        layer._active_adapter = [adapter] if adapter in layer._get_available_adapters() else []
    try:
        yield
    finally:
        for layer, names in zip(layers, previous, strict=True):
            layer._active_adapter = names


def adapter_layers(model: PreTrainedModel) -> list[Any]:
    """Return the modules that hold adapters and can switch between them."""
    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return [module for module in model.modules() if isinstance(module, kinds)]


def load_in_place(model: PreTrainedModel) -> None:
    """Make `load_adapter` load checkpoints into the existing adapter parameters.

    PEFT loads into new parameters and casts them to float32: a resumed QLoRA run would continue in
    another precision, and the critic's gradients would go to parameters that nothing uses.
    """
    # Set a method, not a closure, so that a copy of the model loads into itself.
    model.load_adapter = types.MethodType(_load_adapter, model)


def _load_adapter(model: PreTrainedModel, path: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    if adapter_name in model.peft_config:
        kwargs["autocast_adapter_dtype"] = False
    return type(model).load_adapter(model, path, adapter_name, *args, **kwargs)


def restore_module_dtypes(model: PreTrainedModel) -> None:
    """Cast each module that an adapter trains in full to the dtype of the original module.

    On a quantised base TRL casts all trained parameters to bfloat16; a plain forward pass
    through a float32 model then fails at such a module.
    """
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            module.modules_to_save.to(next(module.original_module.parameters()).dtype)


def match_policy_dtype(model: PreTrainedModel, names: list[str]) -> None:
    """Cast the named parameters to bfloat16, the dtype of the policy's adapter, if the base is quantised."""
    base = model.get_base_model()
    if getattr(base, "is_loaded_in_4bit", False) or getattr(base, "is_loaded_in_8bit", False):
        for name in names:
            if "lora_magnitude_vector" not in name:
                parameter = model.get_parameter(name)
                parameter.data = parameter.data.to(torch.bfloat16)
