"""Sampling of tokens from logits, with the warpers of `generate` and one random stream per turn."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

# Defaults of `generate` for settings that neither its argument nor the model's configuration sets.
_HANDLED: dict[str, Any] = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "suppress_tokens": None,
}
# Fields that do not change the distribution: limits and special ids (which the request or the caller
# sets), methods of computation, choices of outputs, and notes.
_HARMLESS = {
    *("max_length", "max_new_tokens", "pad_token_id", "bos_token_id", "eos_token_id"),
    *("decoder_start_token_id", "use_cache", "max_cache_len", "compile_config", "disable_compile"),
    *("continuous_batching_config", "prefill_chunk_size", "low_memory", "renormalize_logits"),
    *("output_attentions", "output_hidden_states", "output_logits", "output_scores"),
    *("return_dict_in_generate", "transformers_version", "_from_model_config"),
    # Settings of beam search and assisted generation, which are not supported.
    *("early_stopping", "length_penalty", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind"),
    "max_matching_ngram_size",
}
# Neutral values of the remaining fields; None is neutral for every field.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "cache_implementation": ("dynamic", "hybrid"),
    **dict.fromkeys(("is_assistant", "remove_invalid_values", "token_healing", "use_mtp"), (False,)),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("diversity_penalty", "epsilon_cutoff", "eta_cutoff"), (0.0,)),
    **dict.fromkeys(("num_beam_groups", "num_beams", "num_return_sequences"), (1,)),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "typical_p"), (1.0,)),
}


@dataclass(frozen=True)
class SamplingSettings:
    """Settings that control how a token is drawn.

    Attributes:
        do_sample: draw a token; if False, take the likeliest token.
        temperature: divides the logits.
        top_k: draw among this many likeliest tokens; 0 or None for all.
        top_p: draw among the likeliest tokens that have this probability together; 1 for all.
        min_p: draw among tokens with at least this share of the largest probability; None for all.
        repetition_penalty: divides (multiplies, if negative) the logits of tokens already in the
            row; 1 for no penalty. It applies to a greedy choice too.
        suppress_tokens: ids that are never drawn, such as a vision model's image token; None for none.

    Raises:
        ValueError: a value that the warper of that name refuses.
    """

    do_sample: bool = True
    temperature: float | None = 1.0
    top_k: int | None = 0
    top_p: float | None = 1.0
    min_p: float | None = None
    repetition_penalty: float | None = 1.0
    suppress_tokens: list[int] | None = None

    def __post_init__(self) -> None:
        self.processors()

    @classmethod
    def from_generation_config(
        cls, config: GenerationConfig, model_config: GenerationConfig | None = None
    ) -> tuple[SamplingSettings | None, str | None]:
        """Return (settings, None), or (None, a text that names the unsupported fields).

        Missing fields are taken from `model_config`.
        """
        values = {} if model_config is None else _given(model_config)
        values.update(_given(config))
        refused = shaping(values, _HANDLED)
        if refused:
            return None, f"the generation configuration sets {', '.join(refused)}"
        handled: dict[str, Any] = {name: values.get(name, _HANDLED[name]) for name in _HANDLED}
        return cls(**handled), None

    @property
    def penalises(self) -> bool:
        """Return whether the distribution depends on the tokens already in the row."""
        return self.repetition_penalty not in (None, 1.0)

    @property
    def truncates(self) -> bool:
        """Return whether settings other than the temperature change the distribution."""
        cuts = bool(self.top_k) or (self.top_p or 1.0) < 1.0 or self.min_p is not None
        return self.penalises or bool(self.suppress_tokens) or (self.do_sample and cuts)

    def processors(self) -> LogitsProcessorList:
        """Return the logits processors that `generate` makes of these settings, in the same order."""
        chain = LogitsProcessorList()
        if self.penalises:
            chain.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.suppress_tokens:
            chain.append(SuppressTokensLogitsProcessor(self.suppress_tokens))
        if not self.do_sample:
            return chain
        if self.temperature not in (None, 1.0):
            chain.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            chain.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1.0:
            chain.append(TopPLogitsWarper(self.top_p))
        if self.min_p is not None:
            chain.append(MinPLogitsWarper(self.min_p))
        return chain


def shaping(config: dict[str, Any], others: Collection[str]) -> list[str]:
    """Return the settings that change the distribution, without the names in `others`, as `name=value`."""
    return sorted(
        f"{name}={value!r}"
        for name, value in config.items()
        if name not in others and name not in _HARMLESS and value not in _NEUTRAL.get(name, (None,))
    )


def _given(config: GenerationConfig) -> dict[str, Any]:
    return {name: value for name, value in config.to_diff_dict().items() if value is not None}


def turn_random(seed: tuple[int, ...]) -> Random:
    """Return a turn's random generator. Equal seeds give equal numbers on all processes and machines."""
    # Use `random.Random`, which keeps all bits of its seed; a torch CPU generator keeps only 32.
    text = ",".join(str(int(part)) for part in seed)
    return Random(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big"))


class Sampler:
    """Draws one token per row from logits."""

    # Largest count of numbers in a float64 table [rows, vocabulary]; more rows are drawn in parts.
    TABLE = 2**25

    def __init__(self, settings: SamplingSettings) -> None:
        self.settings = settings
        self._processors = settings.processors()
        self._divisor = settings.temperature or 1.0

    def __call__(self, logits: Tensor, uniforms: Tensor | None, ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Draw tokens [rows] from logits [rows, vocabulary]. Logprobs ignore all settings except temperature.

        `uniforms`: [rows] in [0, 1), float64; None if the choice is greedy. `ids`: [rows, tokens] so far,
        padded with repeats of their tokens; None unless repetition is penalised.
        """
        rows = max(1, self.TABLE // logits.shape[1])
        count = -(-logits.shape[0] // rows)
        given = (logits, uniforms, ids)
        parts = ([None] * count if each is None else each.split(rows) for each in given)
        tokens, logprobs = zip(*map(self._draw, *parts), strict=True)
        return torch.cat(tokens), torch.cat(logprobs)

    def _draw(self, logits: Tensor, uniforms: Tensor | None, ids: Tensor | None) -> tuple[Tensor, Tensor]:
        raw = logits if logits.dtype == torch.float64 else logits.float()
        tempered = raw if self._divisor == 1.0 else raw / self._divisor
        plain = not self.settings.truncates
        scores = tempered if plain else self._processors(ids, raw)
        if uniforms is None:
            tokens = scores.argmax(-1, keepdim=True)
            return tokens[:, 0], (tempered.gather(1, tokens) - tempered.logsumexp(-1, keepdim=True))[:, 0]
        top = scores.amax(-1, keepdim=True)
        weights = (scores - top).double().exp_()
        sums = weights.cumsum(-1)
        tokens = _invert(weights, sums, uniforms[:, None])
        # The sums' last column is the normaliser already, unless tokens were cut away.
        normaliser = top + sums[:, -1:].log() if plain else tempered.logsumexp(-1, keepdim=True)
        return tokens[:, 0], (tempered.gather(1, tokens) - normaliser)[:, 0]


def _invert(weights: Tensor, sums: Tensor, uniforms: Tensor) -> Tensor:
    """Return each row's first token whose cumulative weight exceeds a random share of the total weight.

    `sums` are the running sums of `weights` [rows, vocabulary]. No token [rows, 1] has weight zero.
    """
    total = sums[:, -1:]
    # Keep the share below the total, because a share equal to it would lie beyond every token.
    share = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(sums, share, right=True).clamp_(max=sums.shape[1] - 1)
    # A parallel cumulative sum may rise by a rounding error where the weight is zero.
    return torch.where(weights.gather(1, tokens) > 0, tokens, weights.argmax(-1, keepdim=True))
