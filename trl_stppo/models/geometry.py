"""Shapes of decoders, and how many parameters and bytes they have: no tensor is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# NF4 with double quantisation: 4 bits, and 0.127 for the constants; without it 0.5 (Dettmers et al.
# 2023, arXiv:2305.14314, Section 3).
NF4_BITS, NF4_PLAIN_BITS = 4 + 8 / 64 + 32 / (64 * 256), 4 + 32 / 64
# Model types whose layers are counted right: biases of q, k, v; norms of queries and keys.
_FAMILIES = {
    "qwen2": (True, False),
    "qwen3": (False, True),
    "llama": (False, False),
    "mistral": (False, False),
}


@dataclass(frozen=True)
class Geometry:
    """Shape of a decoder with gated MLPs and RMS norms.

    Attributes:
        hidden, intermediate, layers, heads, kv_heads, head_dim, vocab: as in transformers' configs.
        tied: whether input and output embeddings are one matrix.
        extra: parameters per layer besides matrices and the two norms: biases, norms of q and k.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    extra: int = 0

    @property
    def query(self) -> int:
        """Width of the queries."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Input and output width of each linear layer of one decoder layer."""
        h, i = self.hidden, self.intermediate
        attention = ((h, self.query), (h, self.key), (h, self.key), (self.query, h))
        return (*attention, (h, i), (h, i), (i, h))

    @property
    def linear_parameters(self) -> int:
        """Weights of all linear layers: what QLoRA quantises, and LoRA adapts."""
        return self.layers * sum(a * b for a, b in self.matrices)

    @property
    def parameters(self) -> int:
        """All of the causal language model."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        norms = self.hidden * (2 * self.layers + 1)
        return self.linear_parameters + embeddings + norms + self.layers * self.extra

    @property
    def critic_parameters(self) -> int:
        """All of a critic of this shape: no language-model head, a value head without bias."""
        head = 0 if self.tied else self.vocab * self.hidden
        return self.parameters - head + self.hidden

    def lora_parameters(self, rank: int) -> int:
        """Adapters of this rank on all linear layers."""
        return self.layers * sum(rank * (a + b) for a, b in self.matrices)

    def four_bit_weights(self, other_bytes: int = 2, *, double: bool = True) -> int:
        """Bytes with the linear layers in NF4 and everything else in `other_bytes` per parameter."""
        bits = NF4_BITS if double else NF4_PLAIN_BITS
        rest = self.parameters - self.linear_parameters
        return round(self.linear_parameters * bits / 8) + rest * other_bytes

    def cache_per_token(self, element_bytes: int = 2) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.key * element_bytes


def geometry_of(config: Any) -> Geometry:
    """Read a transformers configuration.

    Args:
        config: of a causal language model or a sequence classifier.

    Raises:
        ValueError: of a family that is not counted right here: mixtures of experts, fused or shared
            projections, other norms.
    """
    family = getattr(config, "model_type", None)
    if family not in _FAMILIES:
        raise ValueError(
            f"The memory of a {family!r} model is not known; known are {', '.join(_FAMILIES)}."
        )
    qkv_bias, qk_norm = _FAMILIES[family]
    hidden, heads = config.hidden_size, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    extra = (heads + 2 * kv_heads) * head_dim if qkv_bias else 0
    if not qkv_bias and getattr(config, "attention_bias", False):
        extra += (heads + 2 * kv_heads) * head_dim + hidden
    if getattr(config, "mlp_bias", False):
        extra += 2 * config.intermediate_size + hidden
    return Geometry(
        hidden=hidden,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
        extra=extra + (2 * head_dim if qk_norm else 0),
    )


# Published configurations of Qwen2.5.
QWEN25 = {
    size: Geometry(*shape, extra=(shape[3] + 2 * shape[4]) * shape[5])
    for size, shape in {
        "0.5B": (896, 4864, 24, 14, 2, 64, 151936, True),
        "1.5B": (1536, 8960, 28, 12, 2, 128, 151936, True),
        "3B": (2048, 11008, 36, 16, 2, 128, 151936, True),
        "7B": (3584, 18944, 28, 28, 4, 128, 152064, False),
        "14B": (5120, 13824, 48, 40, 8, 128, 152064, False),
        "32B": (5120, 27648, 64, 40, 8, 128, 152064, False),
    }.items()
}
