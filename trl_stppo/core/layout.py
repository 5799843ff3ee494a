"""Run a model over rows of very different lengths without computing their padding.

A rollout batch is [prompt, padded on the left | completion, padded on the right]. Here each row is
cut to its own tokens, rows of similar lengths are grouped, and the model's outputs are put back at
their places in the batch. A row then starts at position 0 whatever its padding, so that models with
absolute positions get the positions that they had during generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """A group of a batch's rows without their padding, padded on the right to the group's longest row.

    Attributes:
        rows: [b] int64, indices of the rows in the batch.
        start: [b] int64, the column of the batch that became column 0.
        length: [b] int64, columns that hold the row's tokens.
        input_ids: [b, S] int64.
        attention_mask: [b, S] int64, 1 = counts.
    """

    rows: Tensor
    start: Tensor
    length: Tensor
    input_ids: Tensor
    attention_mask: Tensor


def group_rows(
    lengths: Sequence[int], *, max_rows: int | None = None, overhead: float = 0.0
) -> list[list[int]]:
    """Group rows so that the fewest tokens are computed. Each group is padded to its longest row.

    Args:
        lengths: tokens of each row.
        max_rows: rows that a group may have, at least 1; `None` for any number.
        overhead: cost of one more group, in tokens; infinity gives as few groups as possible.

    Returns:
        Row indices by group, shortest rows first; every row once.
    """
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows must be at least 1, or None for any number; got {max_rows}")
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    limit = len(order) if max_rows is None else max_rows
    if overhead == float("inf"):
        return [order[first : first + limit] for first in range(0, len(order), limit)]
    # best[n]: least cost of the n shortest rows; its last group begins at begins[n].
    best, begins = [0.0], [0]
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        firsts = range(max(0, end - limit), end)
        cost, begin = min((best[n] + (end - n) * longest + overhead, n) for n in firsts)
        best.append(cost)
        begins.append(begin)
    groups, end = [], len(order)
    while end:
        groups.append(order[begins[end] : end])
        end = begins[end]
    return groups[::-1]


def row_spans(attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's start and length. A row extends from its first to its last nonzero column.

    Args:
        attention_mask: [B, L], nonzero = counts.

    Returns:
        start [B] and length [B], int64; 0 and 1 for a row in which nothing counts.
    """
    columns = torch.arange(attention_mask.size(1), device=attention_mask.device)
    counts = attention_mask != 0
    last = (columns * counts).amax(dim=1)
    first = columns.new_full((1,), attention_mask.size(1)).where(~counts, columns).amin(dim=1)
    first = first.minimum(last)
    return first, last - first + 1


def cut_rows(
    input_ids: Tensor,
    attention_mask: Tensor,
    rows: Tensor,
    width: int,
    start: Tensor,
    length: Tensor,
) -> Part:
    """Take `rows` [b] out of a batch [B, L], and remove the padding on both sides.

    `width`: S, at least the length of the longest row; `start`, `length`: [B] int64 from `row_spans`.
    """
    start, length = start[rows], length[rows]
    offsets = torch.arange(width, device=input_ids.device)
    columns = (start.unsqueeze(1) + offsets).clamp(max=input_ids.size(1) - 1)
    inside = offsets < length.unsqueeze(1)
    mask = attention_mask[rows].gather(1, columns).to(torch.int64) * inside
    # Column 0 always counts, because a row without an attended token would give a softmax over nothing.
    mask[:, 0] = 1
    return Part(rows, start, length, input_ids[rows].gather(1, columns), mask)


def tail_width(part: Part, batch_width: int, num_tokens: int) -> int:
    """Return how many last columns of a part contain every row's last `num_tokens` columns of the batch."""
    first = batch_width - num_tokens - int(part.start.max())
    return max(1, part.input_ids.size(1) - max(0, first))


def put_back(parts: Sequence[Part], tails: Sequence[Tensor], batch_width: int, num_tokens: int) -> Tensor:
    """Put the parts' outputs back in batch order: the last `num_tokens` columns, [B, N], with 0 at padding.

    `parts` hold every row once. `tails` are the outputs of each part's last K columns, [b, K]. Gradients flow
    through.
    """
    wanted = torch.arange(batch_width - num_tokens, batch_width, device=parts[0].rows.device)
    found = []
    for part, tail in zip(parts, tails, strict=True):
        columns = wanted - part.start.unsqueeze(1)
        index = columns - (part.input_ids.size(1) - tail.size(1))
        inside = (index >= 0) & (columns < part.length.unsqueeze(1))
        found.append(tail.gather(1, index.clamp(0, tail.size(1) - 1)).masked_fill(~inside, 0))
    order = torch.cat([part.rows for part in parts]).argsort()
    return torch.cat(found)[order]
