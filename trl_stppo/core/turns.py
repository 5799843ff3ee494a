"""Positions of an episode's turns, and conversion of numbers between tokens and turns.

A turn is a run of tokens that the policy sampled between two messages of the environment. Spans
are half-open `[start, end)` (the paper's end is inclusive: |y^k| = end - start here). In tensors
`turn_index` [B, T] marks the turns: k at the tokens of turn k (0-based), -1 everywhere else. Each
turn is contiguous; the turns of an episode are numbered 0, 1, 2, ... from left to right.
"""

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from trl_stppo.core.masking import (
    check_choice,
    check_float,
    check_like,
    check_turn_columns,
    check_turn_count,
    check_turn_index,
    upcast,
)
from trl_stppo.errors import TurnSpanError

TURN_REDUCTIONS = ("sum", "mean")


def turn_index_from_spans(
    spans: Sequence[Sequence[tuple[int, int]]],
    length: int,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Build the turn index, [B, T], from the spans of the turns that the rollout recorded.

    Adjacent spans (one ends where the next starts) stay two turns: an empty observation does not
    join them. An episode may have no turns.

    Args:
        spans: per episode, its turns in order, each (start, end) in tokens, 0 <= start < end <=
            `length`, end excluded.
        length: T, number of tokens per row, padding included.
        device: device of the result; default CPU.

    Returns:
        [B, T] int64, k inside turn k, -1 elsewhere.

    Raises:
        TurnSpanError: a span is not a pair of integers, is empty, leaves [0, length), or begins before
            the turn before it has ended.

    Source: s_k, a_k of arXiv:2511.20718v1 (turn-level MDP).
    """
    rows = torch.full((len(spans), length), -1, dtype=torch.int64)
    for episode, turns in enumerate(spans):
        before = 0
        for turn, span in enumerate(turns):
            where = f"episode {episode}, turn {turn}, span {span!r}"
            try:
                start, end = map(operator.index, span)
            except (TypeError, ValueError) as error:
                raise TurnSpanError(f"{where}: must be a pair of integers") from error
            # A Python bool is an int, so a mask passed by mistake would count as offsets.
            if any(isinstance(offset, bool) for offset in span):
                raise TurnSpanError(f"{where}: must be a pair of integers, not bools")
            if not before <= start < end <= length:
                raise TurnSpanError(f"{where}: must have {before} <= start < end <= {length}")
            rows[episode, start:end] = turn
            before = end
    return rows if device is None else rows.to(device)


def num_turns(turn_index: Tensor) -> Tensor:
    """Return the number of turns of each episode, [B] int64, from `turn_index` [B, T]."""
    check_turn_index(turn_index)
    # Append -1, because amax refuses rows without a column (T = 0).
    return torch.nn.functional.pad(turn_index, (0, 1), value=-1).amax(dim=1) + 1


def turn_starts(turn_index: Tensor) -> Tensor:
    """Return a [B, T] bool tensor that is True at the first token of each turn of `turn_index` [B, T]."""
    check_turn_index(turn_index)
    before = torch.nn.functional.pad(turn_index[:, :-1], (1, 0), value=-1)
    return (turn_index >= 0) & (turn_index != before)


def turn_ends(turn_index: Tensor) -> Tensor:
    """Return a [B, T] bool tensor that is True at the last token of each turn, which carries its reward."""
    check_turn_index(turn_index)
    after = torch.nn.functional.pad(turn_index[:, 1:], (0, 1), value=-1)
    return (turn_index >= 0) & (turn_index != after)


def reduce_turns(x: Tensor, turn_index: Tensor, *, num_turns: int, op: str) -> Tensor:
    """Sum or average `x` over the tokens of each turn. Gradients flow through.

    Args:
        x: [B, T] float; anything, NaN included, where `turn_index` is negative.
        turn_index: [B, T] int64, -1 outside turns. Holes in a turn are allowed here.
        num_turns: K, at least the largest turn count of the batch. T always suffices and, unlike
            `num_turns(turn_index).max()`, does not wait for the GPU.
        op: "sum" or "mean".

    Returns:
        [B, K] float, 0 for turns that an episode does not have.
    """
    check_turn_index(turn_index)
    check_choice("op", op, TURN_REDUCTIONS)
    check_float(x=x)
    check_like("turn_index", turn_index, x=x)
    if num_turns < 0:
        raise ValueError(f"num_turns must be at least 0, got {num_turns}")
    check_turn_count("num_turns", num_turns, turn_index)
    x = upcast(x)
    # Bucket 0 collects all values outside turns, NaN included, and is dropped with a zero gradient.
    buckets = x.new_zeros(x.shape[0], num_turns + 1)
    sums = buckets.scatter_add(1, turn_index + 1, x)[:, 1:]
    if op == "sum":
        return sums
    counts = buckets.scatter_add(1, turn_index + 1, torch.ones_like(x))[:, 1:]
    return sums / counts.clamp(min=1)


def broadcast_turns(x: Tensor, turn_index: Tensor) -> Tensor:
    """Copy each turn's number in `x` to all tokens of the turn. Gradients flow through.

    Args:
        x: [B, K] float; anything, NaN included, for turns that an episode does not have.
        turn_index: [B, T] int64, -1 outside turns, less than K everywhere.

    Returns:
        [B, T] in the dtype of `x`, 0 outside turns.
    """
    check_turn_index(turn_index)
    check_float(x=x)
    check_turn_columns("x", x, turn_index)
    return torch.nn.functional.pad(x, (1, 0)).gather(1, turn_index + 1)
