"""Key-value storage with one slot per episode, in which each episode grows in place.

Behind its episode's tokens a slot holds zeros, because attention multiplies masked values by zero, and zero
times a NaN of an earlier episode is a NaN.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

# Lengths are multiples of this number: attention kernels need aligned masks, allocators few sizes.
ALIGNMENT = 16
# Kinds of layers in configurations.
FULL, SLIDING = "full_attention", "sliding_attention"
GROWTH = 1.5


def aligned(length: int) -> int:
    """Round a number of tokens up to a multiple of `ALIGNMENT`."""
    return -(-length // ALIGNMENT) * ALIGNMENT


class SlotTensor:
    """Storage tensor [slots + 1, heads, length, width]. Padding is written to the last slot.

    `like` [rows, heads, tokens, width] gives heads, width, dtype and device.
    """

    def __init__(self, like: Tensor, slots: int, length: int) -> None:
        self.data = like.new_zeros(slots + 1, like.shape[1], length, like.shape[3])

    def resize(self, slots: int, length: int, used: int) -> None:
        """Enlarge the tensor to `slots` and `length`. The first `used` tokens of each slot are kept."""
        old = self.data[:-1, :, :used]
        self.data = old.new_zeros(slots + 1, old.shape[1], length, old.shape[3])
        self.data[: old.shape[0], :, :used] = old

    def write(self, states: Tensor, span: Span) -> Tensor:
        """Write new states [rows, heads, tokens, width] into the span's rows, and return the whole rows."""
        data = self.data
        index = span.index(data.shape[0], data.shape[1], data.shape[2])
        data.view(-1, data.shape[3]).index_copy_(0, index, states.reshape(-1, data.shape[3]))
        if isinstance(span.rows, slice):
            return data[span.rows, :, : span.longest]
        return data[:, :, : span.longest].index_select(0, span.rows)


class Span:
    """The slots and positions that one forward pass reads and writes.

    `positions` [rows, tokens]: each token's place in its slot, -1 for padding. `padded`: whether there is
    padding. Attention reads the first `longest` tokens of each slot.
    """

    def __init__(self, slots: list[int], positions: Tensor, longest: int, padded: bool) -> None:
        self.positions, self.longest, self.padded = positions, longest, padded
        first, count, device = slots[0], len(slots), positions.device
        if slots == list(range(first, first + count)):
            # Adjacent slots are read as a view, without a copy.
            self.rows: slice | Tensor = slice(first, first + count)
            self._slots = torch.arange(first, first + count, device=device)
        else:
            self.rows = self._slots = torch.tensor(slots, device=device)
        self._indices: dict[tuple[int, int, int], Tensor] = {}

    def index(self, slots: int, heads: int, length: int) -> Tensor:
        """Return the rows of new tokens in a cache [slots * heads * length, width]; cached by shape."""
        shape = (slots, heads, length)
        if shape not in self._indices:
            each = torch.arange(heads, device=self._slots.device)
            heads_of_rows = self._slots[:, None] * heads + each
            index = heads_of_rows[:, :, None] * length + self.positions[:, None]
            if self.padded:
                spare = (slots - 1) * heads * length
                index = index.masked_fill(self.positions[:, None] < 0, spare)
            self._indices[shape] = index.flatten()
        return self._indices[shape]


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer. `cache` defines their size and the rows in use."""

    is_sliding = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate keys and values with the heads, width, dtype and device of the first states."""
        self.keys = SlotTensor(key_states, self.cache.slots, self.cache.length)
        self.values = SlotTensor(value_states, self.cache.slots, self.cache.length)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new states [rows, heads, tokens, width], and return all states of these rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        span = self.cache.span
        return self.keys.write(key_states, span), self.values.write(value_states, span)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys that `update` returns."""
        return self.cache.span.longest, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens per row that attention reads, padding included."""
        return self.cache.span.longest

    def get_max_length(self) -> int:
        """Return -1, which transformers reads as no maximum."""
        return -1


class SlotCache(Cache):
    """Key-value cache of all layers. Its rows are episodes of different lengths.

    Call `reserve` and `aim`, then run the model with the cache.

    Attributes:
        slots: number of episodes that fit.
        length: tokens that fit in each slot.
        used: largest number of tokens of any episode so far.
        span: slots and positions of the next forward pass.
        ids: the tokens themselves, [slots + 1, 1, length, 1]; None unless `keep_ids`.
    """

    def __init__(self, *, keep_ids: bool, device: torch.device) -> None:
        # The layers begin when the model first writes to them.
        replicated: Any = functools.partial(SlotLayer, self)
        super().__init__(layer_class_to_replicate=replicated)
        self.slots = self.length = self.used = 0
        self.span: Span
        blank = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
        self.ids = SlotTensor(blank, 0, 0) if keep_ids else None

    def reserve(self, slots: int, length: int) -> None:
        """Make room for `slots` episodes of `length` tokens. Growing allocates some spare room."""
        if slots > self.slots or length > self.length:
            if slots > self.slots:
                self.slots = max(slots, int(self.slots * GROWTH))
            if length > self.length:
                self.length = aligned(max(length, int(self.length * GROWTH)))
            for tensor in self._tensors():
                tensor.resize(self.slots, self.length, self.used)
        self.used = max(self.used, length)

    def aim(self, span: Span, tokens: Tensor) -> None:
        """Set the slots and positions of the next forward pass, which runs over tokens [rows, tokens]."""
        self.span = span
        if self.ids is not None:
            self._row_ids = self.ids.write(tokens[:, None, :, None], span)[:, 0, :, 0]

    def tokens(self) -> Tensor | None:
        """Return the last pass's token ids, [rows, span.longest], padded with each row's first token."""
        if self.ids is None:
            return None
        ends = self.span.positions[:, -1:]
        inside = torch.arange(self.span.longest, device=ends.device) <= ends
        return torch.where(inside, self._row_ids, self._row_ids[:, :1])

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy the slots `sources` to the slots `targets`. All slots are read before a slot is written."""
        for tensor in self._tensors():
            pair = torch.tensor([sources, targets], device=tensor.data.device)
            used = tensor.data[:, :, : self.used]
            used[pair[1]] = used.index_select(0, pair[0])

    def share(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first `length` tokens of the slot `source` to the slots `targets`."""
        for tensor in self._tensors():
            tensor.data[targets, :, :length] = tensor.data[source, :, :length]

    def clear(self, slots: list[int]) -> None:
        """Fill slots with zeros, so that no values of an earlier episode remain."""
        for tensor in self._tensors():
            places = torch.tensor(slots, device=tensor.data.device)
            tensor.data[:, :, : self.used].index_fill_(0, places, 0)

    def _tensors(self) -> list[SlotTensor]:
        of_layers = [t for layer in self.layers for t in (layer.keys, layer.values)]
        return of_layers if self.ids is None else [*of_layers, self.ids]


def supports(model: nn.Module) -> str | None:
    """Return the reason why a model cannot use a `SlotCache`, as a sentence, or None if it can."""
    base = base_of(model)
    config = base.config
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        return "The model is an encoder-decoder."
    if text is not config and not hasattr(base.base_model, "get_image_features"):
        return "The model takes more than text and images."
    known = inspect.signature(base.forward).parameters
    mutual = getattr(text, "use_bidirectional_attention", None) == "vision"
    if mutual or (text is not config and "token_type_ids" in known):
        return "The tokens of an image attend to each other."
    adapter: Any = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        return "The model's adapter adds virtual tokens to each row."
    if cache_argument(model) is None or "position_ids" not in known:
        return "The model's forward does not take a cache and position_ids."
    attention = getattr(config, "_attn_implementation", None)
    if attention not in ("sdpa", "eager"):
        return f"The model's attention implementation is {attention!r}, not 'sdpa' or 'eager'."
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "The model's layers are on several devices."
    return _attention_kind(base, text)


def _attention_kind(base: nn.Module, config: Any) -> str | None:
    if getattr(base, "_is_stateful", False):
        return "The model has a recurrent state, which a key-value cache does not hold."
    kinds = getattr(config, "layer_types", getattr(config, "attention_layers", None))
    others = sorted(set(kinds or ()) - {FULL, SLIDING, "global"})
    if others:
        return f"The model has layers of other kinds than full and sliding attention: {', '.join(others)}."
    if window_of(config) is not None and not type(base).__module__.startswith("transformers."):
        return "The model's own code limits its attention to a sliding window."
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return "The model's rotary frequencies depend on the longest row of a batch (longrope)."
    if getattr(config, "alibi", False):
        return "The model takes positions from its attention mask (ALiBi)."
    if getattr(config, "num_kv_shared_layers", 0):
        return "Some of the model's layers share their keys and values."
    if not getattr(config, "is_causal", True):
        return "The model's attention is not causal."
    return None


def cache_argument(model: nn.Module) -> str | None:
    """Return the name of the argument for a cache, which transformers 5.24 renamed; None if there is none."""
    known = inspect.signature(base_of(model).forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in known), None)


def options_of(model: nn.Module, keep: int) -> dict[str, Any]:
    """Return the options for a forward pass that computes only the last `keep` logits of each row."""
    known = inspect.signature(base_of(model).forward).parameters
    options = {"logits_to_keep": keep, "output_router_logits": False}
    return {name: value for name, value in options.items() if name in known}


def window_of(config: Any) -> int | None:
    """Return the number of tokens to which sliding attention is limited, or None without a limit."""
    used = getattr(config, "use_sliding_window", True)
    return getattr(config, "sliding_window", None) if used else None


def attention_mask(model: nn.Module, attends: Tensor, distance: Tensor) -> Any:
    """Return a mask in the model's form: numbers to add for "eager", a dictionary for two kinds of layers.

    `attends`: bool, True where a token (next to last axis) attends to another (last axis), if no window
    hides it. `distance`: by how many tokens the other is before it.
    """
    config = base_of(model).config.get_text_config(decoder=True)
    window = window_of(config)
    near = attends if window is None else attends & (distance < window)
    masks = {FULL: attends, SLIDING: near}
    if getattr(config, "_attn_implementation", None) == "eager":
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        blocked = torch.finfo(dtype).min
        masks = {
            kind: torch.zeros_like(m, dtype=dtype).masked_fill_(~m, blocked) for kind, m in masks.items()
        }
    kinds = set(getattr(config, "layer_types", None) or [SLIDING])
    return masks if len(kinds) > 1 else masks[kinds.pop()]


def base_of(model: nn.Module) -> Any:
    """Return the base model, without the wrapper of PEFT adapters."""
    unwrap: Any = getattr(model, "get_base_model", None)
    return model if unwrap is None else unwrap()
