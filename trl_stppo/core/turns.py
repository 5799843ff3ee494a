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
        TurnSpanError: a span is not a pair of integers, is empty, leaves [0, length), overlaps the
            turn before it or comes before it.

    Source: s_k, a_k of arXiv:2511.20718v1 (turn-level MDP).
    """
    rows = torch.full((len(spans), length), -1, dtype=torch.int64)
    for episode, turns in enumerate(spans):
        previous: tuple[int, int] | None = None
        for turn, span in enumerate(turns):
            start, end = _checked_span(episode, turn, span, previous, length)
            rows[episode, start:end] = turn
            previous = (start, end)
    return rows.to(device) if device is not None else rows


def _checked_span(
    episode: int, turn: int, span: Sequence[int], previous: tuple[int, int] | None, length: int
) -> tuple[int, int]:
    """Return `span` as (start, end), or raise a TurnSpanError that describes the span's fault."""
    where = f"episode {episode}, turn {turn}, span {span!r}"
    try:
        start, end = (operator.index(offset) for offset in span)
    except (TypeError, ValueError) as error:
        raise TurnSpanError(f"{where}: a span is a pair of integers (start, end)") from error
    if any(isinstance(offset, bool) for offset in span):
        # A Python bool is an int, so a mask passed by mistake would count as offsets.
        raise TurnSpanError(f"{where}: a span is a pair of integers (start, end), not bools")
    if start < 0:
        raise TurnSpanError(f"{where}: start must be at least 0")
    if end > length:
        raise TurnSpanError(f"{where}: end must be at most the length, {length} tokens")
    if end <= start:
        raise TurnSpanError(f"{where}: a turn has at least one token, so end must exceed start")
    if previous is not None and start < previous[1]:
        fault = "out of order: ends" if end <= previous[0] else "overlaps: starts"
        raise TurnSpanError(
            f"{where}: {fault} before turn {turn - 1}, span {previous!r}, is over; "
            f"start must be at least {previous[1]}"
        )
    return start, end


def num_turns(turn_index: Tensor) -> Tensor:
    """Return the number of turns of each episode.

    Args:
        turn_index: [B, T] int64, -1 outside turns.

    Returns:
        [B] int64, turns; 0 for an episode without turns.

    Raises:
        ValueError: `turn_index` is not [B, T] int64.
    """
    check_turn_index(turn_index)
    # Append -1, because amax refuses rows without a column (T = 0).
    return torch.nn.functional.pad(turn_index, (0, 1), value=-1).amax(dim=1) + 1


def turn_starts(turn_index: Tensor) -> Tensor:
    """Flag the first token of each turn.

    Args:
        turn_index: [B, T] int64, -1 outside turns.

    Returns:
        [B, T] bool, True at the first token of each turn, adjacent turns included.

    Raises:
        ValueError: `turn_index` is not [B, T] int64.
    """
    check_turn_index(turn_index)
    before = torch.nn.functional.pad(turn_index[:, :-1], (1, 0), value=-1)
    return (turn_index >= 0) & (turn_index != before)


def turn_ends(turn_index: Tensor) -> Tensor:
    """Flag the last token of each turn, which carries the turn's environment reward.

    Args:
        turn_index: [B, T] int64, -1 outside turns.

    Returns:
        [B, T] bool, True at the last token of each turn, adjacent turns included.

    Raises:
        ValueError: `turn_index` is not [B, T] int64.
    """
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
        [B, K] float, 0 for turns that an episode does not have. Float32 for half precision input.

    Raises:
        ValueError: unknown `op`, `x` not floating point, wrong shapes, or `num_turns` negative or
            (on a CPU) too small.
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

    Raises:
        ValueError: `x` is not [B, K] floating point, `turn_index` is not [B, T] int64, or (on a CPU)
            K is too small.
    """
    check_turn_index(turn_index)
    check_float(x=x)
    check_turn_columns("x", x, turn_index)
    return torch.nn.functional.pad(x, (1, 0)).gather(1, turn_index + 1)
