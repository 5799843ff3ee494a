"""Memory use of a training run, computed from shapes and settings alone.

`Setup` describes the run, `estimate` adds up the tensors alive in each phase; `shapes.py` reads
models into a `Setup`. Sizes are bytes unless a name has another unit. The count per layer is what
autograd keeps of transformers' Llama-like decoders with SDPA attention, as Korthikanti et al. 2022
(arXiv:2205.05198, Section 4.1) count it for their models; for other families it is an approximation.
`docs/lab/measurements.md` has the error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

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
# State per parameter; torch's own optimizers keep it in the parameter's dtype, here float32.
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw_32bit"), 8.0),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), 2.0),
    **dict.fromkeys(("ademamix", "paged_ademamix_32bit"), 12.0),
    **dict.fromkeys(("ademamix_8bit", "paged_ademamix_8bit"), 3.0),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit", "adagrad", "rmsprop", "rmsprop_bnb"), 4.0),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit", "rmsprop_bnb_8bit"), 1.0),
    "adamw_torch_4bit": 1.0,
    "rmsprop_bnb_32bit": 4.0,
    "adafactor": 0.1,
    "sgd": 0.0,
}
# NF4 with double quantisation: 4 bits, and 0.127 for the constants; without it 0.5 (Dettmers et al.
# 2023, arXiv:2305.14314, Section 3).
NF4_BITS, NF4_PLAIN_BITS = 4 + 8 / 64 + 32 / (64 * 256), 4 + 32 / 64


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
    parameters: int  # all of the model, adapters not counted
    linear: int  # parameters of all linear layers, which QLoRA quantises and LoRA adapts
    widths: int  # sum of their input and output widths
    largest: int  # parameters of the largest of them

    def lora_parameters(self, rank: int) -> int:
        """Return the number of parameters of LoRA adapters of this rank on all linear layers."""
        return rank * self.widths

    def four_bit_weights(self, other_bytes: int = 2, *, double: bool = True) -> int:
        """Return the bytes of the weights with NF4 linear layers and `other_bytes` per other parameter."""
        bits = NF4_BITS if double else NF4_PLAIN_BITS
        return round(self.linear * bits / 8) + (self.parameters - self.linear) * other_bytes

    def cache_per_token(self, element_bytes: int = 2) -> int:
        """Return the bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.key * element_bytes


@dataclass(frozen=True)
class Setup:
    """The models and settings of a training run that determine its memory use."""

    geometry: Geometry  # of the policy
    weights: int  # bytes of the policy's loaded backbone
    # Trained parameters (a count) of policy and critic.
    trainable: int
    critic_trainable: int
    adapters: int = 0  # bytes of all adapters and value heads that are not part of a backbone
    critic_weights: int = 0  # bytes of a separate critic's backbone; 0 if it shares the policy's
    reference_weights: int = 0  # bytes of a separate reference model
    critic_geometry: Geometry | None = None  # shape of a separate critic; default the policy's
    full: bool = False  # the policy's backbone itself is trained
    critic_full: bool = False  # the critic's backbone is trained
    four_bit: bool = False  # linear layers are dequantised for each use
    weight_bytes: int = 2  # per element of embeddings and residual stream: the loaded dtype
    compute_bytes: int = 2  # per element where matrices are multiplied: autocast's dtype
    trainable_bytes: int = 4  # per trained parameter
    rows: int = 1  # episodes per micro-batch
    # Tokens of the longest episode.
    prompt: int = 0
    completion: int = 1024
    accumulates: bool = True  # more than one micro-batch makes an optimizer step
    checkpointing: bool = True  # layers are computed again in the backward pass
    optim: str = "adamw_torch_fused"  # name, as in TrainingArguments
    # Gradients of the policy's size besides its own: 1 if the clipping bias is measured, 2 with
    # a loss-side KL or an entropy bonus too.
    bias_buffers: int = 0
    # Episodes in flight in the rollout; 0 if another process or function plays them.
    slots: int = 0
    scoring_rows: int = 0  # episodes per pass of the critic before the update; 0 takes `rows`
    other: int = 0  # other bytes, such as an engine's buffers
    gathered: int = 0  # bytes of weights that an engine gathers for a rollout
    overlaps: bool = False  # the next rollout is played during the update

    @property
    def length(self) -> int:
        """Number of tokens of the longest episode, prompt included."""
        return self.prompt + self.completion


def make_qlora(setup: Setup, rank: int = 16) -> Setup:
    """Return a copy of the setup with four-bit weights, bfloat16 adapters and a shared critic."""
    shape = setup.geometry
    if setup.full:
        adapter = shape.lora_parameters(rank)
        setup = replace(setup, trainable=adapter, critic_trainable=adapter + shape.hidden + 1)
    return replace(
        setup,
        full=False,
        critic_full=False,
        four_bit=True,
        weights=shape.four_bit_weights(),
        critic_weights=0,
        critic_geometry=None,
        reference_weights=0,  # the backbone without its adapter
        adapters=2 * (setup.trainable + setup.critic_trainable),
        trainable_bytes=2,
        weight_bytes=2,
        compute_bytes=2,
    )


@dataclass(frozen=True)
class Estimate:
    """Expected memory use of a run in each phase, in bytes."""

    # Bytes alive at the peak of each phase, by name.
    phases: Mapping[str, Mapping[str, int]]
    overhead: int  # bytes of the libraries, in every phase

    @property
    def phase(self) -> str:
        """Name of the phase with the highest memory use."""
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> int:
        """Bytes in use in the phase with the highest memory use, overhead included."""
        return self.total(self.phase)

    def total(self, phase: str) -> int:
        """Return the bytes in use in a phase, overhead included."""
        return sum(self.phases[phase].values()) + self.overhead

    def parts(self, phase: str) -> str:
        """Return a text with the sizes of a phase's parts in GiB, largest first."""
        parts = {**self.phases[phase], "overhead": self.overhead}
        order = sorted(parts.items(), key=lambda part: -part[1])
        return ", ".join(f"{name} {size / GIB:.1f}" for name, size in order if size / GIB >= 0.05)


def optimizer_bytes(optim: str, parameters: int, element_bytes: int = 4) -> int:
    """Return the bytes of an optimizer's state after its first step. Unknown names count as AdamW."""
    each = OPTIMIZERS.get(optim, 8.0)
    if optim.startswith(("adamw_torch", "ademamix")) and not optim.endswith("bit"):
        each *= element_bytes / 4
    return round(parameters * each)


def estimate(setup: Setup) -> Estimate:
    """Estimate the memory in use in each phase of a training run."""
    trained = setup.trainable + setup.critic_trainable
    state = optimizer_bytes(setup.optim, trained, setup.trainable_bytes)
    kept = {
        "weights": setup.weights + setup.critic_weights + setup.reference_weights,
        "adapters": setup.adapters,
        # Paged states move to the host's memory when the card needs room.
        "optimizer": 0 if setup.optim.startswith("paged") else state,
        "others": setup.other,
    }
    if setup.overlaps and setup.slots:  # a copy of the policy plays
        kept["policy copy"] = setup.trainable * setup.trainable_bytes
    others = setup.other + setup.gathered
    # Some optimizers loop over all parameters at once.
    in_loops = setup.optim in ("adamw_torch", "rmsprop", "adagrad")
    step = {"gradients": _gradients(setup)[0], "optimizer": state}
    step["step's tables"] = trained * setup.trainable_bytes if in_loops else 0
    phases = {
        "rollout": {**kept, "others": others, **_rollout(setup)},
        "scoring": {**kept, **_scoring(setup)},
        "update": {**kept, **_update(setup)},
        "optimizer step": kept | step,
    }
    if setup.overlaps:
        beside = {f"rollout's {name}": size for name, size in _rollout(setup).items()}
        phases = {
            name: parts if name == "rollout" else parts | beside for name, parts in phases.items()
        }
    return Estimate(phases, OVERHEAD)


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
    tokens = setup.rows * setup.length
    critic = setup.critic_geometry or setup.geometry
    sides = [(setup.geometry, setup.full), (critic, setup.critic_full)]
    graphs = [_graph(setup, shape, full, tokens) for shape, full in sides]
    stored, layer = max(graphs, key=sum)
    lasting, fresh = _gradients(setup)
    # The head's tile comes before the layers' backward pass and its gradients.
    tile = _tile(setup, backward=True)
    if graphs[0][0] + tile > stored + layer + fresh:
        return {"gradients": lasting, "activations": graphs[0][0], "log-probabilities": tile}
    return {"gradients": lasting + fresh, "activations": stored + layer}


def _graph(setup: Setup, shape: Geometry, full: bool, tokens: int) -> tuple[int, int]:
    """Return the bytes that a forward pass keeps, and the bytes of one layer's backward pass."""
    c, r = setup.compute_bytes, setup.weight_bytes
    h, q, i = shape.hidden, shape.query, shape.intermediate
    cast = r != c or (setup.trainable_bytes != c and not full)
    kept = (1 + (r == 4)) * h * r  # the layer's input, and the residual if it is not copied
    kept += 2 * h * 4 if r == 2 else 0  # norms compute in float32
    kept += 2 * h * r if full else 0  # inputs of trained norms
    kept += (5 if cast else 2) * h * c  # inputs of the linear layers, each its own copy if cast
    kept += 5 * q * c + 4 * i * c  # queries, repeated keys and values, output twice; the MLP
    working = 3 * i * c + 2 * h * r
    matrices = shape.linear // shape.layers
    weights = matrices * c if r != c and not setup.four_bit else 0  # casts, kept with the graph
    buffer = 2 * shape.largest * c if setup.four_bit else 0
    mask = setup.rows * setup.length**2 * (1 + c)
    final = tokens * h * (r + c)
    if setup.checkpointing:
        inputs = tokens * shape.layers * h * r
        cache = shape.layers * weights if full else 0  # autocast keeps casts of trained weights
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
    room = round(CACHE_GROWTH * setup.length) * (slots + 1)  # one slot takes the padding
    cache = room * shape.cache_per_token(setup.compute_bytes)
    tokens = min(PREFILL_TOKENS, slots * setup.length)
    sampled = slots * shape.vocab * SAMPLER_BYTES
    return {"KV cache": cache, "forward": _working(setup, tokens) + sampled}


def _scoring(setup: Setup) -> dict[str, int]:
    mask = setup.rows * setup.length**2 * (1 + setup.compute_bytes)
    critic = _working(setup, max(setup.rows, setup.scoring_rows) * setup.length)
    policy = max(_working(setup, setup.rows * setup.length), _tile(setup, backward=False))
    return {"forward": max(policy, critic) + mask}
