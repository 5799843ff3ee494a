"""Operations on the rows of batches: shuffled, sorted, selected and trimmed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from .batch import Tokens, UpdateData, full_sequence, row_tokens

Columns = TypeVar("Columns", bound=Tokens)


def num_episodes(batches: Sequence[UpdateData]) -> int:
    """Count the distinct episodes in a list of micro-batches."""
    numbers = torch.cat([batch["episode"] for batch in batches])
    return len(numbers[numbers >= 0].unique())


def deal(batches: Sequence[UpdateData], count: int) -> list[UpdateData]:
    """Shuffle the episodes of a rollout, from one or several batches, into `count` equal micro-batches."""
    joined = join(batches)
    device = joined["loss_mask"].device
    order = torch.randperm(num_episodes([joined])).view(count, -1)
    owners = joined["episode"].cpu()
    rows = [torch.cat([(owners == number).nonzero()[:, 0] for number in numbers]) for numbers in order]
    # Padding rows train nothing, so put all of them into the first micro-batch.
    rows[0] = torch.cat([rows[0], (owners < 0).nonzero()[:, 0]])
    return [take_rows(joined, own.to(device)) for own in rows]


def group_by_length(batches: list[UpdateData]) -> list[UpdateData]:
    """Sort a mini-batch's rows by length into its micro-batches, shortest first, to save padding."""
    return _regrouped(batches, lambda joined: row_tokens(joined).argsort(stable=True))


def group_by_beginning(batches: list[UpdateData]) -> list[UpdateData]:
    """Sort a mini-batch's rows by tokens into its micro-batches, so that equal beginnings are neighbours."""

    def order(joined: UpdateData) -> Tensor:
        ids, mask, _ = full_sequence(joined)
        rows = [row[kept].tolist() for row, kept in zip(ids, mask.bool(), strict=True)]
        return torch.tensor(sorted(range(len(rows)), key=rows.__getitem__), device=ids.device)

    return _regrouped(batches, order)


def _regrouped(batches: list[UpdateData], order: Callable[[UpdateData], Tensor]) -> list[UpdateData]:
    """Split the rows of batches into equally many batches by `order`; return a single batch unchanged."""
    if len(batches) == 1:
        return batches
    joined = join(batches)
    return [take_rows(joined, rows) for rows in order(joined).tensor_split(len(batches))]


def take_rows(batch: Columns, rows: Tensor) -> Columns:
    """Select rows of a batch by index."""
    return _columns(batch, lambda name, x: x[rows])


def join(batches: Sequence[UpdateData]) -> UpdateData:
    """Concatenate batches along their rows."""
    if len(batches) == 1:
        return batches[0]
    every = cast(Sequence[dict[str, Tensor]], batches)
    return _columns(batches[0], lambda name, _: torch.cat([batch[name] for batch in every]))


def without_padding(batch: Columns) -> Columns:
    """Drop the last columns of a batch if they are padding in every row."""
    width = batch["completion_mask"].size(1)
    length = max(1, int(batch["completion_mask"].sum(dim=1).max()))

    def short(name: str, x: Tensor) -> Tensor:
        by_token = x.ndim == 2 and x.size(1) == width and not name.startswith(("prompt_", "images"))
        return x[:, :length] if by_token else x

    return _columns(batch, short)


def _columns(batch: Columns, change: Callable[[str, Tensor], Tensor]) -> Columns:
    """Return a batch with every column changed by a function of its name and tensor."""
    columns = cast(dict[str, Tensor], batch)
    return cast(Columns, {name: change(name, x) for name, x in columns.items()})
