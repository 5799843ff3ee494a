"""Packs: several rows as one row of a model, so that tokens at the start of several rows are computed once.

A pack is a tree of tokens. Rows with the same beginning share its tokens. Each token attends only to the
tokens of its own rows up to itself, and keeps the position that it has in these rows. The states that
predict the wanted tokens are gathered before the model's head, so that no other state is projected.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

Row = list[int]


class Pack(NamedTuple):
    """Rows of a batch as one row of L tokens.

    Attributes:
        rows: indices of the rows in the batch, in the order of their tokens.
        input_ids: [1, L] int64.
        position_ids: [1, L] int64, each token's position in its rows.
        attends: [1, 1, L, L] bool, True where the token of the third axis attends to the token of the fourth.
        places: one [S] int64 tensor per row, the places of its tokens in the pack.
        images: images in the order of their tokens.
        axes: [axes, 1, L] int64, positions of a model with several axes of positions, else None.
    """

    rows: list[int]
    input_ids: Tensor
    position_ids: Tensor
    attends: Tensor
    places: list[Tensor]
    images: Sequence[Any] = ()
    axes: Tensor | None = None


def shared_lengths(rows: Sequence[Row]) -> tuple[list[int], list[int]]:
    """Return an order in which rows with the same beginning are neighbours, and the shared lengths.

    A shared length is the number of first tokens that a row and its predecessor in this order have in common.
    """
    order = sorted(range(len(rows)), key=rows.__getitem__)
    shared = [0]
    for before, row in pairwise(order):
        pairs = zip(rows[before], rows[row], strict=False)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        shared.append(min(len(rows[before]), len(rows[row])) if same is None else same)
    return order, shared


def plan_packs(
    rows: Sequence[Row], *, max_tokens: int, quadratic: float, overhead: float = 0.0
) -> tuple[list[list[int]], float]:
    """Divide rows into packs with the lowest total cost.

    Args:
        rows: tokens of each row.
        max_tokens: limit of a pack; a longer row is a pack of its own.
        quadratic: cost of attention, in tokens per token squared: L tokens cost L + quadratic * L^2.
        overhead: cost of one more pack, in tokens.

    Returns:
        Row indices by pack, every row once, and the cost of all packs in tokens.
    """
    order, shared = shared_lengths(rows)
    best, begins = [0.0], [0]
    for end in range(1, len(order) + 1):
        tokens, found = 0, []
        for first in range(end - 1, -1, -1):
            # The next row is counted already, and so are the tokens that row `first` shares with it.
            tokens += len(rows[order[first]]) - (shared[first + 1] if first + 1 < end else 0)
            if tokens > max_tokens and first < end - 1:
                break
            found.append((best[first] + tokens + quadratic * tokens**2 + overhead, first))
        cost, begin = min(found)
        best.append(cost)
        begins.append(begin)
    packs, end = [], len(order)
    while end:
        packs.append(order[begins[end] : end])
        end = begins[end]
    return packs[::-1], best[-1]


def build_pack(rows: Sequence[Row], numbers: Sequence[int], device: torch.device) -> Pack:
    """Build a pack of the rows `numbers` of a batch, in any order. Each row has at least one token."""
    order, shared = shared_lengths([rows[number] for number in numbers])
    ordered = [numbers[place] for place in order]
    ids: Row = []
    positions: list[int] = []
    places: list[list[int]] = []
    for number, same in zip(ordered, shared, strict=True):
        new = rows[number][same:]
        before = places[-1][:same] if places else []
        places.append([*before, *range(len(ids), len(ids) + len(new))])
        ids += new
        positions += range(same, same + len(new))
    attends = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    of_rows = [torch.tensor(own) for own in places]
    for own, same in zip(of_rows, shared, strict=True):
        attends[own[same:, None], own] = torch.ones(len(own), len(own)).tril()[same:].bool()
    return Pack(
        ordered,
        torch.tensor([ids], device=device),
        torch.tensor([positions], device=device),
        attends[None, None].to(device),
        [own.to(device) for own in of_rows],
    )
