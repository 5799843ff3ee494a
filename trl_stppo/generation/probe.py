"""Compares the sampler with the model's own forward pass before a model samples its first turn.

`slots.supports` refuses the models that are known to be sampled wrongly. This finds the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NonFiniteError
from .cached import CachedBackend, _Row
from .protocol import TurnRequest, TurnResult
from .sampling import SamplingSettings
from .slots import SlotCache, base_of, options_of

# Nats by which exact arithmetic may differ where logits are a nat or more apart.
TOLERANCE = 1e-3
LONGEST = 2048  # tokens of a row
LENGTHS = (3, 11, 37)
GROWTH = 10  # tokens that each row gets: turns of 1 to 3 and of 4, and 3 in between
# Settings that say from which length on a model may compute otherwise.
_EDGES = ("window", "chunk", "original_max_position")
# Of these `supports` knows when they matter.
_JUDGED = ("sliding_window", "original_max_position_embeddings")


class _Recorder(CachedBackend):
    """Keeps the logits of each row."""

    seen: defaultdict[int, list[Tensor]]

    def _sample(
        self, rows: Sequence[_Row | None], logits: Tensor, cache: SlotCache
    ) -> list[TurnResult]:
        for row, of_row in zip(rows, logits, strict=True):
            if row is not None:
                self.seen[row.key].append(of_row.double())
        return super()._sample(rows, logits, cache)


def why_unlike(model: nn.Module, pad_token_id: int, *, rough: bool = False) -> str | None:
    """Why a model that `supports` accepts is sampled wrongly, as a sentence; None if it is not.

    Rows of unlike lengths play two turns each on a `CachedBackend`. Their log-probabilities are
    compared with those of the model's forward pass over each row alone.

    Args:
        model: on its device, with whole weights.
        pad_token_id: any valid token.
        rough: whether the model computes in 16 bits although its weights have more.
    """
    config = base_of(model).config
    context = getattr(config, "max_position_embeddings", None) or LONGEST
    edges = {name: value for name, value in _edges(config.to_dict()) if 1 < value < context}
    for name, value in edges.items():
        if value + GROWTH > LONGEST and name not in _JUDGED:
            return f"It was not tried beyond {name}={value} tokens."
    crossed = [edge for edge in edges.values() if edge + GROWTH <= LONGEST]
    lengths = [*LENGTHS, *(edge + step for edge in crossed for step in (-2, 0))]
    most = min(context, LONGEST) - GROWTH
    if most < 1:
        return None
    text = Random(0).choices(range(config.vocab_size), k=2 * LONGEST)
    text = [token for token in text if token != pad_token_id]
    rows = [text[at : at + max(1, min(length, most))] for at, length in enumerate(lengths)]
    backend = _Recorder(model, SamplingSettings(do_sample=False), [], pad_token_id=pad_token_id)
    backend.seen = defaultdict(list)
    rough = rough or getattr(model, "is_quantized", False) or _has_halves(model)
    with backend.running(), torch.no_grad():
        try:
            places = _play(backend, rows, text)
        except NonFiniteError:  # the first rollout says the same of real rows
            return None
        own = [_own_logits(model, row, pad_token_id) for row in rows]
        longest = max(range(len(rows)), key=lambda key: len(rows[key]))
        blanks = [min(blank, context - len(rows[longest])) for blank in (1, 16)]
        padded = [_own_logits(model, rows[longest], pad_token_id, blank) for blank in blanks]
    noise = max(_gap(own[longest], logits, rough) for logits in padded)
    spread = min(float(logits.std(-1).mean()) for logits in own)
    allowed = max(TOLERANCE * min(1.0, max(spread, 0.01)), 2 * noise)
    if rough:  # two steps of bfloat16 at the largest logit
        allowed = max(allowed, 2**-6 * max(float(logits.amax(-1).abs().max()) for logits in own))
    gap = max(
        _gap(torch.stack(backend.seen[key]), own[key][[at - len(row) for at in places[key]]], rough)
        for key, row in enumerate(rows)
    )
    if gap <= allowed:
        return None
    return (
        f"Its cached log-probabilities are {gap:.2g} nats from those of its forward pass, and "
        f"{allowed:.2g} are allowed."
    )


def _edges(settings: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """Name and value of each number in a configuration that may be such a length."""
    if isinstance(settings, dict):
        for key, value in settings.items():
            yield from _edges(value, str(key))
    elif isinstance(settings, list | tuple):
        for value in settings:
            yield from _edges(value, name)
    elif type(settings) is int and any(word in name for word in _EDGES):
        yield name, settings


def _play(backend: CachedBackend, rows: list[list[int]], text: list[int]) -> list[list[int]]:
    """Play two turns on each row, which grows by them; the positions whose logits were taken."""
    places: list[list[int]] = [[] for _ in rows]

    def ask(key: int, limit: int) -> None:
        last = len(rows[key]) - 1
        places[key] += range(last, last + limit)
        backend.add(TurnRequest(key, list(rows[key]), limit, (0,)))

    for key in range(len(rows)):
        ask(key, 1 + key % 3)
    again = set(range(len(rows)))
    while backend.busy:
        for result in backend.step():
            rows[result.key] += result.ids
            if result.key in again:
                again.remove(result.key)
                rows[result.key] += text[:3]
                ask(result.key, 4)
    return places


def _own_logits(model: nn.Module, row: list[int], pad: int, blank: int = 0) -> Tensor:
    """Logits of a row's last tokens without a cache, padded on the right with `blank` tokens."""
    device = next(model.parameters()).device
    ids = torch.tensor([row + [pad] * blank], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * blank], device=device)
    options = options_of(model, GROWTH + 1 + blank)
    logits: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False, **options).logits
    return logits[0, : logits.shape[1] - blank][-GROWTH - 1 :].double()


def _gap(left: Tensor, right: Tensor, rough: bool) -> float:
    """How far two tables of log-probabilities, given as logits, are apart: at most, or in the mean."""
    a, b = (logits.clamp(-1e4, 1e4).log_softmax(-1) for logits in (left, right))
    gap = (a - b).abs()
    # In 16 bits one position may go far astray, such as to another expert.
    return float(gap.mean() if rough else gap.max())


def _has_halves(model: nn.Module) -> bool:
    return any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
