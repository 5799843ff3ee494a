"""Checks of the policy's PEFT adapters. `docs/one_gpu.md` lists the supported adapters."""

from __future__ import annotations

from typing import Any

POLICY, REFERENCE, CRITIC = "default", "ref", "critic"
# Initialisations with zero output at first, so that the bare backbone is the initial policy.
NEUTRAL_INITS = (True, "gaussian", "orthogonal", "eva", "mica")
# Initialisations that move a part of the base weights into the adapter; the rest is not a working model.
SPLIT_INITS = ("pissa", "olora")

# Fields that do not work with turns, the critic's pass or a second adapter; falsy values are allowed.
REFUSED_FIELDS = (
    *("alora_invocation_tokens", "use_qalora", "monteclora_config", "arrow_config"),
    *("layer_replication", "megatron_config"),
)


def check_policy_adapter(model: Any, peft_config: Any) -> None:
    """Raise ValueError for an adapter that could not be trained, sampled, saved or resumed.

    `peft_config` describes an adapter that is not yet made, or is None.
    """
    config = peft_config
    if hasattr(model, "peft_config"):
        _check_given_adapters(model)
        config = model.peft_config[POLICY]
    if config is None or not hasattr(config, "peft_type"):
        # GRPOTrainer's own error describes an object that is no adapter.
        return
    kind = type(config).__name__
    task = getattr(config.task_type, "value", config.task_type)
    if task not in (None, "CAUSAL_LM"):
        raise ValueError(f"`task_type={task!r}` of {kind}; allowed: 'CAUSAL_LM'.")
    if config.is_prompt_learning or config.is_adaption_prompt or kind == "AdaLoraConfig":
        raise ValueError(f"`peft_config` is a {kind}, which is not supported. Use LoraConfig.")
    if peft_config is not None and config.inference_mode:
        raise ValueError(f"`inference_mode=True` of {kind}; allowed: False.")
    if is_lora(config):
        _check_lora(config, prepared=peft_config is None)


def _check_given_adapters(model: Any) -> None:
    """Raise ValueError for a PeftModel whose adapter does not suit TRL and the checkpoints."""
    loaded = "PeftModel.from_pretrained(base, path, is_trainable=True)"
    if not hasattr(model, "get_base_model"):
        raise ValueError(f"`model` has an adapter loaded by transformers. Load it by {loaded}.")
    if model.active_adapters != [POLICY]:
        raise ValueError(f"`model` has {model.active_adapters} active; allowed: [{POLICY!r}].")
    if REFERENCE in model.peft_config:
        raise ValueError(f"`model` has an adapter {REFERENCE!r}, the reference's name.")
    if not any(p.requires_grad for n, p in model.named_parameters() if POLICY in n.split(".")):
        raise ValueError(f"The adapter {POLICY!r} of `model` is frozen. Load it by {loaded}.")


def _check_lora(config: Any, prepared: bool) -> None:
    init, allowed = config.init_lora_weights, (*NEUTRAL_INITS, False, *SPLIT_INITS)
    if init not in allowed or (init == "eva" and not prepared):
        raise ValueError(
            f"`init_lora_weights={init!r}` is not supported. Allowed: {', '.join(map(repr, allowed))}; "
            f"'eva' in a PeftModel on which peft.initialize_lora_eva_weights was called."
        )
    for name in REFUSED_FIELDS:
        if value := getattr(config, name, None):
            raise ValueError(f"`{name}={value!r}` is not supported. Leave it unset.")


def check_loaded_policy(model: Any) -> None:
    """Raise ValueError for combinations of adapter and base model whose forward pass would fail."""
    if not hasattr(model.get_output_embeddings(), "bias"):
        raise ValueError("`trainable_token_indices` is not supported with tie_word_embeddings.")
    config = model.peft_config[model.active_adapter]
    in_8_bit = getattr(model.get_base_model(), "is_loaded_in_8bit", False)
    if getattr(config, "use_dora", False) and in_8_bit and model.device.type == "cpu":
        raise ValueError("`use_dora=True` on a base in 8 bits is not supported on the CPU.")


def check_untouched_base(config: Any, who: str, instead: str) -> None:
    """Raise ValueError if an adapter trains biases, because these change the base for all adapters."""
    if getattr(config, "bias", "none") != "none":
        raise ValueError(f"`bias={config.bias!r}` changes {who}. Allowed: 'none'; or {instead}.")


def is_lora(config: Any) -> bool:
    """Return whether an adapter configuration is plain LoRA, not a variant of LoRA."""
    kind = getattr(config, "peft_type", None)
    return str(getattr(kind, "value", kind)) == "LORA"
