"""Compares the sampler with the model's own forward pass before any turn is sampled."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NonFiniteError
from .cached import CachedBackend, _Row
from .protocol import TurnRequest, TurnResult
from .sampling import SamplingSettings
from .slots import SlotCache, base_of, options_of

# Allowed difference of log-probabilities, in nats, if the model computes in 32 bits and the standard
# deviation of its logits is at least 1.
TOLERANCE = 1e-3
# Largest number of tokens of a row.
LONGEST = 2048
LENGTHS = (3, 11, 37)
# Largest number of tokens that two turns, and the texts after them, add to a row.
GROWTH = 12
# Settings with a length beyond which a model may compute differently.
_EDGES = re.compile(r'"(\w*(?:window|chunk|original_max_position)\w*)": (\d+)')
# `supports` checks these settings itself.
_JUDGED = ("sliding_window", "original_max_position_embeddings")


class _Recorder(CachedBackend):
    """Backend that records the logits from which it samples, by row and position."""

    seen: defaultdict[int, dict[int, Tensor]]

    def _sample(self, rows: Sequence[_Row | None], logits: Tensor, cache: SlotCache) -> list[TurnResult]:
        for row, of_row in zip(rows, logits, strict=True):
            if row is not None:
                self.seen[row.key][len(row.ids) - 1] = of_row
        return super()._sample(rows, logits, cache)


def why_unlike(model: nn.Module, pad_token_id: int, *, rough: bool = False, reader: Any = None) -> str | None:
    """Return why `CachedBackend` samples a supported model wrongly, or None if it samples correctly.

    A `CachedBackend` samples two turns for each of several rows of different lengths. Its log-probabilities
    are compared with the log-probabilities of a forward pass over each single row. `rough`: the model
    computes in 16 bits although its weights have more. `reader`: the reader of images; one row has two.
    """
    config = base_of(model).config.get_text_config(decoder=True)
    context = getattr(config, "max_position_embeddings", None) or LONGEST
    most, lengths = min(context, LONGEST) - GROWTH, list(LENGTHS)
    for name, value in _EDGES.findall(config.to_json_string(use_diff=False)):
        edge = int(value)
        if 2 < edge < context and edge + GROWTH <= LONGEST:
            lengths += [edge - 2, edge]
        elif 2 < edge < context and name not in _JUDGED:
            return f"It was not tried beyond {name}={edge} tokens."
    if most < 1:
        return None
    text = Random(0).choices(range(config.vocab_size), k=2 * LONGEST)
    unused = {pad_token_id, *(() if reader is None else reader.marks)}
    text = [token for token in text if token not in unused]
    rows = [text[at : at + min(length, most)] for at, length in enumerate(lengths)]
    images: list[tuple[Any, ...]] = [()] * len(rows)
    if reader is not None:
        one, other = reader.samples()
        rows.append([*text[:3], *one.ids, *text[3:5], *other.ids, text[5]])
        images.append((one, other))
        if len(rows[-1]) > most:
            return f"Two images have more tokens than the model's context of {context}."
    greedy = SamplingSettings(do_sample=False, suppress_tokens=sorted(unused) if reader else None)
    backend = _Recorder(model, greedy, [], pad_token_id=pad_token_id, reader=reader)
    backend.seen = defaultdict(dict)
    with backend.running(), torch.no_grad():
        for limit in (2, 4):
            for key, row in enumerate(rows):
                backend.add(TurnRequest(key, [*row], limit + key % 2, (0,), images[key]))
            while backend.busy:
                try:
                    results = backend.step()
                except NonFiniteError:
                    # Report nothing, because the rollout raises this error for its own rows.
                    return None
                for result in results:
                    rows[result.key] += [*result.ids, *text[:2]]
        seen = [partial(reader.model_inputs, own) if own else None for own in images]
        pairs = zip(rows, seen, strict=True)
        exact = [_own_logits(model, row, pad_token_id, see=see) for row, see in pairs]
        long = max((row for row, own in zip(rows, images, strict=True) if not own), key=len)
        blanks = [min(blank, context - len(long)) for blank in (1, 16)]
        padded = [_own_logits(model, long, pad_token_id, blank) for blank in blanks]
    halves = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
    rough = rough or halves or getattr(model, "is_quantized", False)
    noise = max(_gap(exact[rows.index(long)], logits, rough) for logits in padded)
    spread = min(float(logits.std(-1).mean()) for logits in exact)
    allowed = max(TOLERANCE * min(1.0, max(spread, 0.01)), 2 * noise)
    # In 16 bits, allow two steps of bfloat16 at the largest logit.
    if rough:
        allowed = max(allowed, 2**-6 * max(float(logits.amax(-1).abs().max()) for logits in exact))
    gaps = []
    for key, row in enumerate(rows):
        sampled = torch.stack([*backend.seen[key].values()])
        gaps.append(_gap(sampled, exact[key][[at - len(row) for at in backend.seen[key]]], rough))
    message = f"Its cached log-probabilities are {max(gaps):.2g} nats off those of its forward pass"
    return None if max(gaps) <= allowed else f"{message}, and {allowed:.2g} are allowed."


def _own_logits(model: Any, row: list[int], pad: int, blank: int = 0, see: Any = None) -> Tensor:
    """Return the logits of a row's last tokens without a cache, with `blank` tokens of padding at the end."""
    device = next(model.parameters()).device
    ids = torch.tensor([row + [pad] * blank], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * blank], device=device)
    options = options_of(model, GROWTH + 1 + blank)
    options |= see(ids) if see else {}
    logits: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False, **options).logits
    return logits[0, : logits.shape[1] - blank][-GROWTH - 1 :].double()


def _gap(left: Tensor, right: Tensor, rough: bool) -> float:
    """Return the largest difference of two tables' log-probabilities, or the mean difference if `rough`."""
    a, b = (logits.double().clamp(-1e4, 1e4).log_softmax(-1) for logits in (left, right))
    # Use the mean for 16-bit models, because rounding may choose another expert at one position.
    return float((a - b).abs().mean() if rough else (a - b).abs().max())
