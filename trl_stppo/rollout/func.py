"""Reads the optional turn record out of a user's `rollout_func` result, and checks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import TurnSpanError
from .record import RolloutRecord, check_spans, mask_from_spans, spans_from_mask

RolloutFunc = Callable[[list[Any], Any], dict[str, Any]]
# Keys of the result that are ours; TRL hands every other extra key to the reward functions.
OWN_KEYS = ("turn_spans", "turn_rewards", "terminated", "truncated")


def read_rollout(output: dict[str, Any], record: RolloutRecord) -> dict[str, Any]:
    """Move the turn record from a rollout_func's result into `record`.

    Args:
        output: the result: TRL's keys (`prompt_ids`, `completion_ids`, `logprobs`, optional
            `env_mask`) and, optional, `turn_spans`, `turn_rewards`, `terminated`, `truncated`, each
            with one entry per episode.
        record: filled in.

    Returns:
        The result without our keys, its `env_mask` in agreement with the spans.

    Raises:
        TurnSpanError: spans out of order, overlapping, off the completion, or at odds with env_mask.
        ValueError: a list of the wrong length, a completion without tokens, a reward that is not a
            finite number.
    """
    result = {key: value for key, value in output.items() if key not in OWN_KEYS}
    completions = output.get("completion_ids")
    if completions is None:
        return result  # TRL names the missing key
    for episode, ids in enumerate(completions):
        if len(ids) == 0:
            raise ValueError(
                f"`completion_ids[{episode}]` is empty: an episode needs at least one token. Leave the "
                f"episode out, or return the end-of-turn token."
            )
    for key in (*OWN_KEYS, "env_mask"):
        value = output.get(key)
        if value is not None and len(value) != len(completions):
            raise ValueError(
                f"`{key}` has {len(value)} entries for {len(completions)} episodes; return one per "
                f"entry of `completion_ids`."
            )
    masks = output.get("env_mask")
    for episode, mask in enumerate([] if masks is None else masks):
        ids = completions[episode]
        if len(mask) != len(ids):
            raise ValueError(
                f"`env_mask[{episode}]` has {len(mask)} entries for the {len(ids)} tokens of "
                f"`completion_ids[{episode}]`; mark each token 1 (the model's) or 0 (the environment's)."
            )
    record.turn_spans, masks = _spans_and_masks(output, completions)
    if masks is not None:
        result["env_mask"] = masks
    record.turn_rewards = output.get("turn_rewards")
    record.check_turn_rewards()
    if output.get("terminated") is not None:
        record.terminated = [bool(flag) for flag in output["terminated"]]
    if output.get("truncated") is not None:
        record.truncated = [bool(flag) for flag in output["truncated"]]
    return result


def _spans_and_masks(
    output: dict[str, Any], completions: list[list[int]]
) -> tuple[list[list[tuple[int, int]]], list[list[int]] | None]:
    """Spans from the record; without them one turn per run of the mask, or per episode."""
    spans, masks = output.get("turn_spans"), output.get("env_mask")
    if spans is None:
        if masks is None:
            return [[(0, len(ids))] for ids in completions], None
        return [spans_from_mask(mask) for mask in masks], masks
    for episode, (turns, ids) in enumerate(zip(spans, completions, strict=True)):
        check_spans(turns, len(ids), episode)
    covered = [mask_from_spans(s, len(ids)) for s, ids in zip(spans, completions, strict=True)]
    if masks is not None:
        for episode, (mask, cover) in enumerate(zip(masks, covered, strict=True)):
            if [int(flag) for flag in mask] != cover:
                raise TurnSpanError(
                    f"`turn_spans[{episode}]` covers other tokens than `env_mask[{episode}]` marks as "
                    f"the model's. Return one of the two, or make them agree."
                )
    return [[(int(s), int(e)) for s, e in turns] for turns in spans], covered
