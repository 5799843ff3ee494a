"""Memory use of a training run on one process, computed from shapes and settings.

Sizes are bytes unless a name has another unit. The count per layer is what autograd keeps of
transformers' Llama-like decoders with SDPA attention, as Korthikanti et al. 2022 (arXiv:2205.05198,
Section 4.1) count it for their models. `docs/lab/measurements.md` has the error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from peft import get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from trl_stppo.models import adapters
from trl_stppo.models.critic import Critic, SeparateCritic

GIB = 2**30
# Above this share of a card, fragmentation alone can end the run.
FITS = 0.92
# TRL 1.16 computes log-probabilities in tiles [tokens, vocabulary] (trl/kernels/chunked_logprob.py).
TILE_TOKENS, TILE_VOCABULARY = 4096, 32768
# Growth factor of the rollout's cache, and most tokens of one of its forward passes
# (generation/slots.py, generation/cached.py).
CACHE_GROWTH, PREFILL_TOKENS = 1.5, 8192
# Tables of [rows, vocabulary] while a token is drawn: logits, and three in float32 or two in float64.
SAMPLER_BYTES = 16
# Memory of CUDA, cuBLAS and the kernels on a card before the first tensor.
OVERHEAD = round(0.7 * GIB)
# NF4 with double quantisation: 4 bits, and 0.127 for the constants (Dettmers et al. 2023,
# arXiv:2305.14314, Section 3).
NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)


@dataclass(frozen=True)
class Geometry:
    """Sizes and parameter counts of a decoder's layers."""

    # As in transformers' configurations.
    hidden: int
    intermediate: int
    layers: int
    vocab: int
    # Widths of all queries, and of all keys (or values) of a token.
    query: int
    key: int
    # Parameters of the model without adapters, of its linear layers, and of the largest of these.
    parameters: int
    linear: int
    largest: int

    def four_bit_weights(self, other_bytes: int = 2) -> int:
        """Return the bytes of the weights with NF4 linear layers and `other_bytes` per other parameter."""
        return round(self.linear * NF4_BITS / 8) + (self.parameters - self.linear) * other_bytes


@dataclass(frozen=True)
class Setup:
    """The models and settings of a training run that determine its memory use."""

    geometry: Geometry
    # Bytes of the policy's backbone, and numbers of trained parameters.
    weights: int
    trainable: int
    critic_trainable: int
    # Bytes of all adapters and value heads, of a separate critic's backbone, of a separate reference.
    adapters: int = 0
    critic_weights: int = 0
    reference_weights: int = 0
    # Whether the backbones themselves are trained.
    full: bool = False
    critic_full: bool = False
    four_bit: bool = False
    # Bytes per element: embeddings and residual stream, multiplied matrices, trained parameters.
    weight_bytes: int = 2
    compute_bytes: int = 2
    trainable_bytes: int = 4
    # Episodes per micro-batch, and tokens of the longest one.
    rows: int = 1
    prompt: int = 0
    completion: int = 1024
    # Whether several micro-batches make an optimizer step.
    accumulates: bool = True
    checkpointing: bool = True
    # AdamW by its name in TrainingArguments, with states of 8 bits or of the parameters' dtype.
    optim: str = "adamw_torch_fused"
    # Gradients of the policy's size besides its own: 1 if the clipping bias is measured, 2 with a
    # KL in the loss or an entropy bonus too.
    bias_buffers: int = 0
    # Episodes in flight in the rollout; 0 if a function plays them.
    slots: int = 0

    @property
    def length(self) -> int:
        """Number of tokens of the longest episode, prompt included."""
        return self.prompt + self.completion


# -------------------------------------------------------------------------- reading


def policy_shape(config: Any, dtype: str, lora: Any = None, *, four_bit: bool = False) -> Any:
    """Make a policy without weights. `four_bit` marks it as quantised and does not change its shapes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.is_loaded_in_4bit = four_bit
        if lora is not None:
            model = get_peft_model(model, lora)
            trained = [name for name, p in model.named_parameters() if p.requires_grad]
            adapters.match_policy_dtype(model, trained)
    return model


def settings_of(args: Any, prompt: int = 0) -> dict[str, Any]:
    """Return the fields of `Setup` that a configuration sets. `prompt` is the longest prompt in tokens."""
    batch = args.per_device_train_batch_size * (args.steps_per_generation or 1)
    extra = args.entropy_coef != 0.0 or args.beta != 0.0
    return {
        "rows": args.per_device_train_batch_size,
        "prompt": prompt,
        "completion": args.max_completion_length,
        "accumulates": args.gradient_accumulation_steps > 1,
        "checkpointing": args.gradient_checkpointing,
        "optim": str(getattr(args.optim, "value", args.optim)),
        "bias_buffers": (2 if extra else 1) if args.takes_second_gradient else 0,
        "slots": min(batch, args.generation_slots or batch),
        **({"compute_bytes": 2} if args.bf16 else {}),
    }


def read_setup(policy: Any, critic: Critic, reference: Any = None, **settings: Any) -> Setup:
    """Measure the models of a run.

    Args:
        policy: with weights, or of `policy_shape`.
        critic: shared or separate.
        reference: a separate model, or None.
        **settings: other fields of `Setup`.
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
    # Weights on the meta device are not packed.
    planned = four_bit and policy.device.type == "meta"
    read = {
        "geometry": shape,
        "weights": shape.four_bit_weights(width) if planned else byte_size(backbone),
        "trainable": sum(p.numel() for p in trained),
        "critic_trainable": sum(p.numel() for p in of_critic.values()),
        "adapters": byte_size([*added, *critic_added, *head]),
        "critic_weights": byte_size(critic_backbone),
        "reference_weights": 0 if reference is None else byte_size(reference.parameters()),
        "full": not hasattr(policy, "peft_config"),
        "critic_full": separate is not None and not hasattr(separate, "peft_config"),
        "four_bit": four_bit,
        "weight_bytes": width,
        "compute_bytes": width,
        "trainable_bytes": max((p.element_size() for p in trained), default=4),
    }
    return Setup(**{**read, **settings})


def geometry_of(model: Any) -> Geometry:
    """Return the geometry of a Llama-like decoder, without its adapters."""
    config, skip = model.config, set(getattr(model, "peft_config", ()))
    linear = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        # Linear layers of numbered blocks, without adapters.
        if any(part.isdigit() for part in name.split(".")) and not skip & set(name.split("."))
    ]
    sizes, counted = (
        [m.in_features * m.out_features for m in linear],
        {id(m.weight) for m in linear},
    )
    head = config.hidden_size // config.num_attention_heads
    rest = sum(p.numel() for p in _split(model)[0] if id(p) not in counted)
    return Geometry(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        vocab=config.vocab_size,
        query=config.num_attention_heads * head,
        key=config.num_key_value_heads * head,
        parameters=rest + sum(sizes),
        linear=sum(sizes),
        largest=max(sizes),
    )


def _split(model: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters of the backbone, and the parameters of its adapters."""
    names = set(getattr(model, "peft_config", ()))
    parts: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in model.named_parameters():
        parts[bool(names & set(name.split(".")))].append(parameter)
    return parts


def byte_size(parameters: Iterable[torch.Tensor]) -> int:
    """Return the bytes of parameters, including the constants of quantised weights."""
    return sum(p.numel() * p.element_size() + _constants(p) for p in parameters)


def _constants(parameter: Any) -> int:
    """Return the bytes of the block constants that bitsandbytes keeps beside a packed weight."""
    total, state = 0, getattr(parameter, "quant_state", None)
    while state is not None:
        kept = (state.absmax, state.code, getattr(state, "offset", None))
        total += sum(t.numel() * t.element_size() for t in kept if isinstance(t, torch.Tensor))
        # Double quantisation quantises the constants too.
        state = getattr(state, "state2", None)
    return total


# ------------------------------------------------------------------------- computing


def peak(setup: Setup) -> int:
    """Return the bytes of all tensors in the phase that needs most. `OVERHEAD` comes on top."""
    return max(sum(parts.values()) for parts in phases(setup).values())


def phases(setup: Setup) -> dict[str, dict[str, int]]:
    """Return the bytes of each kind of tensor that is alive at the peak of each phase."""
    trained = (setup.trainable + setup.critic_trainable) * setup.trainable_bytes
    state = 2 * trained
    if setup.optim.endswith("8bit"):
        state = 2 * (setup.trainable + setup.critic_trainable)
    kept = {
        "weights": setup.weights + setup.critic_weights + setup.reference_weights,
        "adapters": setup.adapters,
        # Paged states move to the host's memory when the card needs room.
        "optimizer": 0 if setup.optim.startswith("paged") else state,
    }
    step = {"gradients": _gradients(setup)[0], "optimizer": state}
    # This one loops over all parameters at once.
    step["step's tables"] = trained if setup.optim == "adamw_torch" else 0
    return {
        "rollout": {**kept, **_rollout(setup)},
        "scoring": {**kept, **_scoring(setup)},
        "update": {**kept, **_update(setup)},
        "optimizer step": kept | step,
    }


def _gradients(setup: Setup) -> tuple[int, int]:
    """Return the bytes of a mini-batch's gradients, and the additional bytes during a backward pass."""
    policy = setup.trainable * setup.trainable_bytes
    critic = setup.critic_trainable * setup.trainable_bytes
    # An accumulating buffer gets all new gradients at once and adds them afterwards.
    fresh = max(critic, policy if setup.bias_buffers else 0) if setup.accumulates else 0
    # Embeddings and head get a gradient of full size each before the two are added.
    embedding = 2 * setup.geometry.vocab * setup.geometry.hidden * 4 if setup.full else 0
    return policy * (1 + setup.bias_buffers) + critic, max(fresh, embedding)


def _update(setup: Setup) -> dict[str, int]:
    """Return the bytes of gradients and activations in the update: the larger of policy and critic."""
    policy, critic = _graph(setup, setup.full), _graph(setup, setup.critic_full)
    stored, layer = max(policy, critic, key=sum)
    lasting, fresh = _gradients(setup)
    # The head's tile comes before the layers' backward pass and its gradients.
    tile = _tile(setup, backward=True)
    if policy[0] + tile > stored + layer + fresh:
        return {"gradients": lasting, "activations": policy[0], "log-probabilities": tile}
    return {"gradients": lasting + fresh, "activations": stored + layer}


def _graph(setup: Setup, full: bool) -> tuple[int, int]:
    """Return the bytes that a forward pass keeps, and the bytes of one layer's backward pass."""
    c, r, shape = setup.compute_bytes, setup.weight_bytes, setup.geometry
    h, q, i, tokens = shape.hidden, shape.query, shape.intermediate, setup.rows * setup.length
    cast = r != c or (setup.trainable_bytes != c and not full)
    # The layer's input, and the residual if it is not copied.
    kept = (1 + (r == 4)) * h * r
    # Norms compute in float32; trained ones keep their inputs.
    kept += (2 * h * 4 if r == 2 else 0) + (2 * h * r if full else 0)
    # Inputs of the linear layers, each its own copy if cast.
    kept += (5 if cast else 2) * h * c
    # Queries, repeated keys and values, output twice; the MLP.
    kept += 5 * q * c + 4 * i * c
    working = 3 * i * c + 2 * h * r
    # Casts, kept with the graph.
    weights = shape.linear // shape.layers * c if r != c and not setup.four_bit else 0
    buffer = 2 * shape.largest * c if setup.four_bit else 0
    mask = setup.rows * setup.length**2 * (1 + c)
    final = tokens * h * (r + c)
    if setup.checkpointing:
        # Autocast keeps casts of trained weights.
        cache = shape.layers * weights if full else 0
        inputs = tokens * shape.layers * h * r
        return inputs + final + mask + cache, tokens * (kept + working) + weights + buffer
    return shape.layers * (tokens * kept + weights) + final + mask, tokens * working + buffer


def _tile(setup: Setup, *, backward: bool) -> int:
    """Return the bytes needed for the log-probabilities of a micro-batch, which are computed in tiles."""
    c, shape, tokens = setup.compute_bytes, setup.geometry, setup.rows * setup.completion
    tile = min(tokens, TILE_TOKENS) * TILE_VOCABULARY * c
    weights = TILE_VOCABULARY * shape.hidden * c if setup.weight_bytes != c else 0
    hidden = tokens * shape.hidden * (c + (4 if backward else 0))
    head = shape.vocab * shape.hidden * 4 if backward and setup.full else 0
    return tile + weights + hidden + head


def _working(setup: Setup, tokens: int) -> int:
    """Return the peak bytes of a forward pass without gradients, estimated from one layer."""
    shape, c, r = setup.geometry, setup.compute_bytes, setup.weight_bytes
    widest = max(4 * shape.intermediate, 6 * shape.query + 4 * shape.key) * c
    largest = shape.largest if setup.four_bit or r != c else 0
    return tokens * (shape.hidden * (r + 4 + c) + widest) + largest * c


def _rollout(setup: Setup) -> dict[str, int]:
    shape, slots = setup.geometry, setup.slots
    if not slots:
        return {}
    # One more slot takes the padding.
    room = round(CACHE_GROWTH * setup.length) * (slots + 1)
    cache = room * 2 * shape.layers * shape.key * setup.compute_bytes
    tokens = min(PREFILL_TOKENS, slots * setup.length)
    return {
        "KV cache": cache,
        "forward": _working(setup, tokens) + slots * shape.vocab * SAMPLER_BYTES,
    }


def _scoring(setup: Setup) -> dict[str, int]:
    mask = setup.rows * setup.length**2 * (1 + setup.compute_bytes)
    forward = _working(setup, setup.rows * setup.length)
    return {"forward": max(forward, _tile(setup, backward=False)) + mask}
