"""Backend that samples turns with the training weights and keeps each episode's key-value cache.

Each episode has a slot in the key-value storage. A turn first feeds the tokens that are new to its
slot (prefill), several turns padded together, then all turns advance by one token at a time
(decode). Decoding runs over the slots from the first to the last generating slot, as a view.
Idle slots in between take part without being written, which is cheaper than moving
their contents, until there are too many of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NonFiniteError
from .protocol import Backend, TurnRequest, TurnResult
from .sampling import Sampler, SamplingSettings, turn_random
from .slots import SlotCache, Span, aligned, attention_mask, cache_argument, options_of, supports


@dataclass(eq=False)
class _Row:
    """An episode's tokens, `ids`. Its slot holds the keys and values of the first `cached` tokens.

    A turn in flight is `generating` once it has started. `added` is the number of steps before its request.
    """

    key: int
    ids: list[int] = field(default_factory=list)
    cached: int = 0
    slot: int = -1
    limit: int = 0
    generating: bool = False
    added: int = 0
    logprobs: list[float] = field(default_factory=list)
    random: Random = field(default_factory=Random)
    # The request's images, where their tokens lie in `ids`, the row with an image token per image and place,
    # and positions [axes, L] if they are not plain.
    images: tuple[Any, ...] = ()
    extents: list[tuple[int, int]] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    positions: Tensor | None = None
    # Difference between the position of a sampled token and its place in the row.
    shift: int = 0

    @property
    def new(self) -> int:
        return len(self.ids) - self.cached

    def start(self, request: TurnRequest, step: int) -> None:
        self.ids, self.limit, self.added = list(request.ids), request.max_new_tokens, step
        # If no token is new, feed the last token again, because the next token needs its logits.
        last = min(self.cached, len(self.ids) - 1)
        self.cached = next((a for a, b in self.extents if a < last < b), last)
        self.logprobs, self.random = [], turn_random(request.seed)

    def see(self, request: TurnRequest, reader: Any) -> None:
        """Set the images of a request."""
        ids, self.images = request.ids, request.images
        self.extents = reader.extents(ids, self.images)
        self.keys = reader.keys(ids, self.images)
        self.positions = reader.positions(ids, self.images)
        if self.positions is not None:
            self.shift = int(self.positions.max()) + 1 - len(ids)

    def whole(self, end: int, *, least: int = 0) -> int:
        """Return `end`; where it cuts an image, the image's beginning if above `least`, else its end."""
        cut = [(a if a > least else b) for a, b in self.extents if a < end < b]
        return cut[0] if cut else end

    def take(self, token: int, logprob: float, ends: set[int]) -> bool:
        """Append a sampled token. Return whether it ended the turn."""
        if not math.isfinite(logprob):
            raise NonFiniteError(f"Logits of episode {self.key} at {len(self.ids)} are not finite.")
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.generating = token not in ends and len(self.logprobs) < self.limit
        return not self.generating


class CachedBackend(Backend):
    """Backend that samples the turns of many episodes at once with a causal language model.

    Wrap a rollout in `running()`. Without it each step switches the model to evaluation and back, and
    the cache outlives a change of the weights.
    """

    # Queued turns wait for one per ADMIT_ONE_IN generating turns, at most ADMIT_AFTER steps, because a
    # forward pass over few rows takes nearly as long as a forward pass over many rows.
    ADMIT_ONE_IN = 8
    ADMIT_AFTER = 4
    # Generating rows move to adjacent slots if there is more than one idle slot per this many generating
    # slots.
    IDLE_ONE_IN = 8
    # Largest number of tokens of one forward pass, padding included.
    PREFILL_TOKENS = 8192
    # A prefill copies the caches of its rows if their slots are not adjacent. It copies at most this number
    # times PREFILL_TOKENS tokens.
    COPIED_PER_TOKEN = 16
    # New rows with fewer equal tokens at their start do not share the prefill of these tokens.
    SHARED_FROM = 8
    # Number of tokens of a first turn that are allocated together with its prompt.
    FIRST_ROOM = 64

    def __init__(
        self,
        model: nn.Module,
        sampling: SamplingSettings,
        eos_token_ids: list[int],
        *,
        pad_token_id: int,
        capacity: int | None = None,
        reader: Any = None,
    ) -> None:
        reason = supports(model)
        if reason is not None:
            raise ValueError(reason)
        super().__init__(capacity=capacity)
        self.model: Any = model
        self.sampling, self.reader = sampling, reader
        self._pad, self._ends = pad_token_id, set(eos_token_ids)
        self._cache_argument = str(cache_argument(model))
        self._sampler = Sampler(sampling)
        self._running = False
        self._forget()

    def add(self, request: TurnRequest) -> None:
        """Queue a request. Its turn starts in one of the next steps."""
        row = self._rows.get(request.key) or _Row(request.key)
        before, known = row.keys[: row.cached], min(row.cached, len(row.keys))
        if self.reader is not None:
            row.see(request, self.reader)
        if (row.ids[: row.cached], before) != (request.ids[: row.cached], row.keys[:known]):
            raise RuntimeError(f"The row of episode {row.key} has changed in the cached tokens.")
        super().add(request)
        self._rows[row.key] = row
        row.start(request, self._steps)
        self._waiting.append(row)

    def release(self, key: int) -> None:
        """Drop an episode, also in the middle of a turn. Unknown keys are ignored."""
        super().release(key)
        row = self._rows.pop(key, None)
        if row is None:
            return
        if row in self._waiting:
            self._waiting.remove(row)
        self._generating -= row.generating
        if row.slot >= 0:
            self._slots[row.slot] = None

    def step(self) -> list[TurnResult]:
        """Start queued turns if enough are queued, sample a token of each turn, return the ended turns."""
        if not self.busy:
            return []
        self._steps += 1
        with nullcontext() if self._running else inference(self.model), torch.no_grad():
            ended = self._admit()
            return ended + self._decode() if self._generating else ended

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager for evaluation mode in a rollout. Its exit drops all episodes and the cache."""
        if self._running:
            raise RuntimeError("The backend is already running.")
        self._running = True
        try:
            with inference(self.model):
                yield
        finally:
            self._running = False
            self._forget()

    def _forget(self) -> None:
        self._queue.clear()
        self._rows: dict[int, _Row] = {}
        self._slots: list[_Row | None] = []
        self._waiting: list[_Row] = []
        self._generating = self._steps = 0
        self._cache: SlotCache | None = None

    def _admit(self) -> list[TurnResult]:
        """If the wait is over, prefill all queued turns and sample their first tokens."""
        enough = len(self._waiting) >= max(1, self._generating // self.ADMIT_ONE_IN)
        late = self._waiting and self._steps - self._waiting[0].added > self.ADMIT_AFTER
        if not (enough or late):
            return []
        rows = sorted(self._waiting, key=lambda row: row.new)
        self._waiting = []
        cache = self._seat(rows)
        self._share_beginning([row for row in rows if not row.cached], cache)
        rows.sort(key=lambda row: row.new)
        ended: list[TurnResult] = []
        for group in self._groups(rows):
            logits = self._prefill(group, cache)
            for row in group:
                row.generating = True
            self._generating += len(group)
            ended += self._sample(group, logits, cache)
        return ended

    def _seat(self, rows: list[_Row]) -> SlotCache:
        """Assign a free slot to each row without a slot. Return the cache, with room for all rows."""
        if self._cache is None:
            self._device = next(self.model.parameters()).device
            self._options = options_of(self.model, 1)
            self._cache = SlotCache(keep_ids=self.sampling.penalises, device=self._device)
        fresh = [row for row in rows if row.slot < 0]
        self._slots += [None] * max(0, len(fresh) - self._slots.count(None))
        free = [slot for slot, holder in enumerate(self._slots) if holder is None]
        for row, slot in zip(fresh, free, strict=False):
            row.slot, self._slots[slot] = slot, row
        rooms = [len(row.ids) + min(row.limit, self.FIRST_ROOM) for row in rows]
        self._cache.reserve(len(self._slots), max(rooms))
        if fresh:
            self._cache.clear([row.slot for row in fresh])
        return self._cache

    def _share_beginning(self, rows: list[_Row], cache: SlotCache) -> None:
        """Compute the common beginning of all new rows once, and copy its cache to each slot."""
        limit = min((len(row.ids) for row in rows), default=0) - 1
        columns = zip(*((row.keys or row.ids)[:limit] for row in rows), strict=True)
        shared = next((n for n, ids in enumerate(columns) if len({*ids}) > 1), max(0, limit))
        if rows:
            # An image is shared as a whole or not at all.
            shared = min([shared, *(a for a, b in rows[0].extents if a < shared < b)])
        if len(rows) < 2 or shared < self.SHARED_FROM:
            return
        first = replace(rows[0], ids=rows[0].ids[:shared], cached=0)
        self._prefill([first], cache)
        cache.share(first.slot, [row.slot for row in rows[1:]], shared)
        for row in rows:
            row.cached = shared

    def _groups(self, rows: list[_Row]) -> Iterator[list[_Row]]:
        """Split rows, sorted by their number of new tokens, into groups that fit one forward pass each."""
        group: list[_Row] = []
        longest = 0
        for row in rows:
            count, longest = len(group) + 1, max(longest, len(row.ids))
            copied = count * longest <= self.PREFILL_TOKENS * self.COPIED_PER_TOKEN
            if group and not (copied and count * row.new <= self.PREFILL_TOKENS):
                yield group
                group, longest = [], len(row.ids)
            group.append(row)
        if group:
            yield group

    def _prefill(self, rows: list[_Row], cache: SlotCache) -> Tensor:
        """Feed the rows' new tokens, padded on the left. Return logits [rows, vocabulary]."""
        # Left padding puts each row's last new token into the last column, the only column with logits.
        while max(row.new for row in rows):
            starts, ids, positions = [row.cached for row in rows], [], []
            for row in rows:
                end = min(len(row.ids), row.cached + self.PREFILL_TOKENS)
                row.cached = row.whole(end, least=row.cached)
            spans = [(start, row.cached) for start, row in zip(starts, rows, strict=True)]
            counts = [end - start for start, end in spans]
            wide = max(counts)
            for row, (start, end) in zip(rows, spans, strict=True):
                blank = wide - (end - start)
                ids.append([self._pad] * blank + row.ids[start:end])
                positions.append([-1] * blank + list(range(start, end)))
            padded, seen = min(counts) < wide, self._images(rows, spans)
            logits = self._forward([row.slot for row in rows], ids, positions, padded, cache, seen)
        return logits

    def _images(self, rows: list[_Row], spans: list[tuple[int, int]]) -> dict[str, Tensor]:
        """Return inputs for the images in parts of rows, and positions of tokens if these are not plain."""
        if self.reader is None:
            return {}
        images = [
            image for row, (start, end) in zip(rows, spans, strict=True)
            for image, (a, b) in zip(row.images, row.extents, strict=True) if start <= a and b <= end
        ]  # fmt: skip
        inputs: dict[str, Tensor] = self.reader.joined(images, self._device)
        places = [row.positions for row in rows]
        own = [p[:, a:b] for p, (a, b) in zip(places, spans, strict=True) if p is not None]
        if own:
            wide = max(each.size(1) for each in own)
            padded = [nn.functional.pad(each, (wide - each.size(1), 0)) for each in own]
            inputs["position_ids"] = torch.stack(padded, dim=1).to(self._device)
        return inputs

    def _decode(self) -> list[TurnResult]:
        """Feed the last token of each generating turn, and sample the next token."""
        cache = self._cache
        assert cache is not None
        seated = [row for row in self._slots if row is not None and row.generating]
        if (seated[-1].slot + 1 - len(seated)) * self.IDLE_ONE_IN > len(seated):
            self._close_ranks(seated, cache)
        last = max(row.slot for row in seated)
        rows = [row if row and row.generating else None for row in self._slots[: last + 1]]
        ids = [[row.ids[-1] if row else self._pad] for row in rows]
        positions = [[row.cached if row else -1] for row in rows]
        cache.reserve(len(self._slots), max(row.cached for row in seated) + 1)
        padded, seen = len(seated) < len(rows), {}
        if seated[0].positions is not None:
            places = [row.cached + row.shift if row else 0 for row in rows]
            axes = len(seated[0].positions)
            seen["position_ids"] = torch.tensor(places, device=self._device).expand(axes, 1, -1).mT
        logits = self._forward(list(range(len(rows))), ids, positions, padded, cache, seen)
        for row in seated:
            row.cached += 1
        return self._sample(rows, logits, cache)

    def _close_ranks(self, seated: list[_Row], cache: SlotCache) -> None:
        """Swap generating rows in rear slots with idle slots in front, so that rows lie side by side."""
        count = len(seated)
        idle = set(range(count)) - {row.slot for row in seated}
        sources, targets = [], []
        behind = [row for row in seated if row.slot >= count]
        for row, slot in zip(behind, sorted(idle), strict=True):
            other, rear = self._slots[slot], row.slot
            sources.append(rear)
            targets.append(slot)
            if other is not None:
                sources.append(slot)
                targets.append(rear)
                other.slot = rear
            self._slots[slot], self._slots[rear], row.slot = row, other, slot
        cache.move(sources, targets)

    def _forward(
        self,
        slots: list[int],
        ids: list[list[int]],
        positions: list[list[int]],
        padded: bool,
        cache: SlotCache,
        inputs: dict[str, Tensor],
    ) -> Tensor:
        """Run the model on new tokens [rows, tokens]. Return each row's last logits [rows, vocabulary].

        `positions` are -1 for padding; `padded`: whether there is padding. `inputs` are those of images.
        """
        tokens, places = torch.tensor([ids, positions], device=self._device)
        longest = aligned(max(row[-1] for row in positions) + 1)
        cache.aim(Span(slots, places, longest, padded), tokens)
        # Padding attends to the first token, because attending to nothing would give NaN.
        seen = places.clamp(min=0) if padded else places
        distance = seen[:, None, :, None] - torch.arange(longest, device=self._device)
        output = self.model(
            input_ids=tokens,
            attention_mask=attention_mask(self.model, distance >= 0, distance),
            use_cache=True,
            **{self._cache_argument: cache, "position_ids": seen, **self._options, **inputs},
        )
        return output.logits[:, -1]

    def _sample(self, rows: Sequence[_Row | None], logits: Tensor, cache: SlotCache) -> list[TurnResult]:
        """Sample one token per row from logits [rows, vocabulary]. Return the turns that ended."""
        uniforms = None
        if self.sampling.do_sample:
            draws = [row.random.random() if row else 0.5 for row in rows]
            uniforms = torch.tensor(draws, dtype=torch.float64, device=self._device)
        sampled = self._sampler(logits, uniforms, cache.tokens())
        # Join ids and log-probabilities in one transfer, because float64 holds token ids exactly.
        tokens, logprobs = torch.stack([part.double() for part in sampled]).tolist()
        ended = []
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            if row and row.take(int(token), logprob, self._ends):
                del self._queue[row.key]
                ids = row.ids[-len(row.logprobs) :]
                ended.append(TurnResult(row.key, ids, row.logprobs, version=self.version))
        self._generating -= len(ended)
        return ended


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Context manager of evaluation mode without gradient checkpointing. Its exit restores all flags."""
    # A model with checkpointing computes no cache. Change only the flag, so that the options stay.
    names = ("training", "gradient_checkpointing")
    flags = [(module, name) for module in model.modules() for name in names]
    was_on = [(module, name) for module, name in flags if getattr(module, name, False) is True]
    try:
        for module, name in was_on:
            setattr(module, name, False)
        yield
    finally:
        for module, name in was_on:
            setattr(module, name, True)
