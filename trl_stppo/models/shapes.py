"""Models without weights on the meta device, and measurement of models for the memory estimate."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from . import adapters
from .critic import Critic, SeparateCritic
from .critic_models import critic_from_config
from .memory import Geometry, Setup

# ------------------------------------------------------------------------- building


def policy_shape(
    config: Any, dtype: str, peft_config: Any = None, *, four_bit: bool = False
) -> Any:
    """Make a policy without weights. `four_bit` marks it as quantised and does not change its shapes."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        model.is_loaded_in_4bit = four_bit
        if peft_config is not None:
            model = get_peft_model(model, copy.deepcopy(peft_config))  # PEFT changes its copy
            trained = [name for name, p in model.named_parameters() if p.requires_grad]
            adapters.match_policy_dtype(model, trained)
    return model


def critic_shape(config: Any, dtype: str) -> Any:
    """Make a separate critic without weights, from a configuration and a dtype."""
    with torch.device("meta"):
        return critic_from_config(config, dtype=dtype)


# -------------------------------------------------------------------------- reading


def read_setup(policy: Any, critic: Critic, reference: Any = None, **settings: Any) -> Setup:
    """Measure the models of a run, and return the setup for the memory estimate.

    `reference` is a separate model, or None; `settings` are other fields of `Setup`.
    """
    separate: Any = critic.model if isinstance(critic, SeparateCritic) else None
    of_critic = {id(p): p for p in critic.parameters()}
    trained = [p for p in policy.parameters() if p.requires_grad and id(p) not in of_critic]
    (backbone, added), shape = _split(policy), geometry_of(policy)
    critic_backbone, critic_added = ([], []) if separate is None else _split(separate)
    inside = {id(p) for p in policy.parameters()}
    head = [p for p in of_critic.values() if separate is None and id(p) not in inside]
    width = policy.get_input_embeddings().weight.element_size()
    four_bit = bool(getattr(policy, "is_loaded_in_4bit", False))
    planned = four_bit and policy.device.type == "meta"  # the weights are not packed
    read = {
        "geometry": shape,
        "weights": shape.four_bit_weights(width) if planned else byte_size(backbone),
        "trainable": sum(map(elements, trained)),
        "critic_trainable": sum(map(elements, of_critic.values())),
        "adapters": byte_size([*added, *critic_added, *head]),
        "critic_weights": byte_size(critic_backbone),
        "reference_weights": 0 if reference is None else byte_size(reference.parameters()),
        "critic_geometry": None if separate is None else geometry_of(separate),
        "full": not hasattr(policy, "peft_config"),
        "critic_full": separate is not None and not hasattr(separate, "peft_config"),
        "four_bit": four_bit,
        "weight_bytes": width,
        "compute_bytes": width,
        "trainable_bytes": max((p.element_size() for p in trained), default=4),
    }
    return Setup(**{**read, **settings})


def geometry_of(model: Any) -> Geometry:
    """Return the geometry of a model without its adapters and heads."""
    config = model.config.get_text_config()
    skip = set(getattr(model, "peft_config", {}))
    linear = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        # Linear layers of numbered blocks, without adapters.
        if any(part.isdigit() for part in name.split(".")) and not skip & set(name.split("."))
    ]
    sides = [_sides(module) for module in linear]
    counted = {id(module.weight) for module in linear}
    rest = sum(elements(p) for p in _split(model)[0] if id(p) not in counted)
    total = sum(a * b for a, b in sides)
    try:
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return Geometry(
            hidden=config.hidden_size,
            intermediate=_intermediate(config, sides),
            layers=config.num_hidden_layers,
            vocab=config.vocab_size,
            query=heads * head_dim,
            key=kv_heads * head_dim,
            parameters=rest + total,
            linear=total,
            widths=sum(a + b for a, b in sides),
            largest=max(a * b for a, b in sides),
        )
    except (AttributeError, ValueError) as error:
        raise ValueError(
            f"The memory of a {config.model_type!r} model is unknown, as is the shape of its layers: {error}."
        ) from error


def _sides(module: Any) -> tuple[int, int]:
    """Return the input and output width of a linear layer, also if its weight is packed."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return module.weight.shape[0], module.weight.shape[1]


def _intermediate(config: Any, sides: list[tuple[int, int]]) -> int:
    """Return the width of the MLP, or with experts the total width that one token passes through."""
    width = getattr(config, "intermediate_size", None) or max(max(pair) for pair in sides)
    experts = getattr(config, "num_experts_per_tok", None)
    return experts * (getattr(config, "moe_intermediate_size", None) or width) if experts else width


def _split(model: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters of the backbone, and the parameters of its adapters."""
    names = set(getattr(model, "peft_config", {}))
    parts: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in model.named_parameters():
        parts[bool(names & set(name.split(".")))].append(parameter)
    return parts


def byte_size(parameters: Iterable[torch.Tensor]) -> int:
    """Return the bytes of parameters, including the constants of quantised weights."""
    return sum(elements(p) * p.element_size() + _constants(p) for p in parameters)


def elements(parameter: torch.Tensor) -> int:
    """Return the number of elements of the full parameter, also if ZeRO-3 has sharded it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _constants(parameter: Any) -> int:
    """Return the bytes of the block constants that bitsandbytes keeps beside a packed weight."""
    total, state = 0, getattr(parameter, "quant_state", None)
    while state is not None:  # double quantisation quantises the constants too
        kept = (state.absmax, state.code, getattr(state, "offset", None))
        total += sum(t.numel() * t.element_size() for t in kept if isinstance(t, torch.Tensor))
        state = getattr(state, "state2", None)
    return total
