"""Which PEFT adapters a policy may have; `docs/one_gpu.md` tables them.

What would not be trained, played, saved or resumed as its configuration says is refused before
anything is loaded or trained.
"""

from __future__ import annotations

from typing import Any

POLICY, REFERENCE, CRITIC = "default", "ref", "critic"
# Initialisations that change nothing at first, so that the bare backbone is the initial policy.
NEUTRAL_INITS = (True, "gaussian", "orthogonal", "eva", "mica")
# ... that move a part of the base weights into the adapter; the rest is no model of its own.
SPLIT_INITS = ("pissa", "olora")

_PREPARE = (
    "Make the adapter yourself, store the base weights as it leaves them, load both with "
    "init_lora_weights=True and pass that PeftModel"
)
# init_lora_weights -> (why not, what to do instead).
REFUSED_INITS = {
    "pissa_niter": (
        "its decomposition is drawn at random, so that the saved adapter would not fit the base it is "
        "loaded on",
        "Use 'pissa'",
    ),
    "corda": ("its covariances come from a pass over data that nobody makes here", _PREPARE),
    "lora_ga": ("its gradients come from a pass over data that nobody makes here", _PREPARE),
    "loftq": (
        "it imitates quantisation on a base that is not quantised",
        "Load the base in 4 bits, call get_peft_model and peft.replace_lora_weights_loftq, and pass "
        "the PeftModel",
    ),
}
# Field of LoraConfig -> (why not, what to do instead); anything falsy is allowed.
REFUSED_FIELDS = {
    "alora_invocation_tokens": (
        "an aLoRA adapter acts only behind its invocation tokens, which neither turns nor the critic's "
        "pass track, so that nothing would be trained",
        "Leave it unset",
    ),
    "use_qalora": ("PEFT implements it for GPTQ alone", "Set use_qalora=False"),
    "monteclora_config": (
        "its noise makes the ratio of an unchanged policy differ from 1",
        "Leave it unset",
    ),
    "arrow_config": ("it routes between finished adapters and trains none", "Leave it unset"),
    "layer_replication": (
        "PEFT would replicate the layers again for every further adapter, the critic's among them",
        "Leave it unset",
    ),
    "megatron_config": ("Megatron's parallel layers are not supported", "Leave it unset"),
}


def check_policy_adapter(model: Any, peft_config: Any) -> None:
    """Refuse adapters that could not be trained, played, saved or resumed.

    Args:
        model: the policy as the trainer's caller has passed it: a name, a model or a PeftModel.
        peft_config: of an adapter that is still to be made, or None.

    Raises:
        ValueError: names the field, its value, what is allowed and what to do.
    """
    config = peft_config
    if hasattr(model, "peft_config"):
        _check_given_adapters(model)
        config = model.peft_config[POLICY]
    if config is None or not hasattr(config, "peft_type"):
        return  # no adapter, or something of which GRPOTrainer tells what it is
    kind = type(config).__name__
    task = getattr(config.task_type, "value", config.task_type)
    if task not in (None, "CAUSAL_LM"):
        raise ValueError(
            f"`task_type={task!r}` of {kind} is not supported: the policy is a causal "
            f"language model. Set task_type='CAUSAL_LM'."
        )
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise ValueError(
            f"`peft_config` is a {kind}: virtual tokens are there from the start, so that no reference "
            f"is left, and sampling turn by turn does not keep them. Use LoraConfig."
        )
    if kind == "AdaLoraConfig":
        raise ValueError(
            "`peft_config` is an AdaLoraConfig: its ranks change only through update_and_allocate, "
            "which nobody calls here. Use LoraConfig, with rank_pattern for uneven ranks."
        )
    if peft_config is not None and config.inference_mode:
        raise ValueError(
            f"`inference_mode=True` of {kind} freezes the policy's adapter. Set inference_mode=False."
        )
    if is_lora(config):
        _check_lora(config, prepared=peft_config is None)


def _check_given_adapters(model: Any) -> None:
    """Refuse a PeftModel whose adapter is not the one that TRL and the checkpoints expect."""
    if not hasattr(model, "get_base_model"):
        raise ValueError(
            "`model` carries an adapter that transformers has loaded, which TRL would not train as one. "
            "Load it with AutoPeftModelForCausalLM.from_pretrained(path, is_trainable=True)."
        )
    if model.active_adapters != [POLICY]:
        raise ValueError(
            f"The active adapter of `model` is {model.active_adapters}; allowed: [{POLICY!r}], under "
            f"which checkpoints are saved and loaded. Load it under that name: "
            f"PeftModel.from_pretrained(base, path, is_trainable=True)."
        )
    if REFERENCE in model.peft_config:
        raise ValueError(
            f"`model` has an adapter {REFERENCE!r}, the name of the reference that is copied from "
            f"{POLICY!r} at the start. Delete it: model.delete_adapter({REFERENCE!r})."
        )
    if not any(p.requires_grad for n, p in model.named_parameters() if POLICY in n.split(".")):
        raise ValueError(
            f"The adapter {POLICY!r} of `model` is frozen, so nothing would be trained. Load it with "
            f"PeftModel.from_pretrained(base, path, is_trainable=True)."
        )


def _check_lora(config: Any, prepared: bool) -> None:
    init = config.init_lora_weights
    for name, (why, instead) in REFUSED_INITS.items():
        if isinstance(init, str) and init.startswith(name):
            raise ValueError(
                f"`init_lora_weights={init!r}` is not supported: {why}. {instead}. Allowed: "
                f"{', '.join(map(repr, (*NEUTRAL_INITS, False, *SPLIT_INITS)))}."
            )
    if init == "eva" and not prepared:
        raise ValueError(
            "`init_lora_weights='eva'` in `peft_config` would stay the ordinary start: nobody makes its "
            "pass over data here. Call get_peft_model and peft.initialize_lora_eva_weights yourself and "
            "pass the PeftModel."
        )
    for name, (why, instead) in REFUSED_FIELDS.items():
        value = getattr(config, name, None)
        if value:
            raise ValueError(f"`{name}={value!r}` is not supported: {why}. {instead}.")


def check_loaded_policy(model: Any) -> None:
    """Refuse combinations of adapter and base model that fail in the first forward passes."""
    if not hasattr(model.get_output_embeddings(), "bias"):
        raise ValueError(
            "`trainable_token_indices` is not supported where input and output embeddings are one matrix "
            "(tie_word_embeddings): PEFT wraps the output layer along, whose bias TRL reads. Use "
            "modules_to_save=['embed_tokens', 'lm_head'] instead."
        )
    config = model.peft_config[model.active_adapter]
    in_8_bit = getattr(model.get_base_model(), "is_loaded_in_8bit", False)
    if getattr(config, "use_dora", False) and in_8_bit and model.device.type == "cpu":
        raise ValueError(
            "`use_dora=True` on a base in 8 bits is not supported on the CPU: PEFT and bitsandbytes fail "
            "in the second forward pass. Use load_in_4bit=True, or use_dora=False."
        )


def check_untouched_base(config: Any, who: str, instead: str) -> None:
    """Refuse trained biases, which stay in the base weights whichever adapter is active."""
    if getattr(config, "bias", "none") != "none":
        raise ValueError(
            f"`bias={config.bias!r}` of {type(config).__name__} trains biases of the base model, and "
            f"{who} would change with them. Allowed: 'none'; or {instead}."
        )


def is_lora(config: Any) -> bool:
    """Whether a configuration is LoRA's own, not that of a relative."""
    kind = getattr(config, "peft_type", None)
    return str(getattr(kind, "value", kind)) == "LORA"
