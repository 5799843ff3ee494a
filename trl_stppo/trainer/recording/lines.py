"""Conversion of a rollout batch and its update to lines of a trace file."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...trace.format import DIGITS, TracedEpisode, TracedUpdate

Pieces = Callable[[list[int]], list[str]]  # the text of each token
# Lines do not contain the update, so this one is a placeholder.
NOWHERE = TracedUpdate("train", "train", 0, 0)
# The powers of ten that float64 represents exactly.
_POWERS = torch.tensor([10.0**power for power in range(23)], dtype=torch.float64)


def lines(
    episodes: list[dict[str, Any]],
    batch: dict[str, Tensor],
    passes: dict[str, Tensor],
    pieces: Pieces,
) -> list[dict[str, Any]]:
    """Make a line of the trace for each entry of `facts.facts` and its row of the rollout batch, [N, T].

    `passes`, of the last pass over them, [N or more, T]: `logprobs`, `log_ratio`, `clipped`, the episode's
    `weight`, and `seen`, whether there was a pass. Empty without a pass. `pieces` cuts the text.
    """
    # The only synchronisation with the device.
    batch = {name: tensor.cpu() for name, tensor in batch.items()}
    passes = {name: tensor.cpu()[: len(episodes)] for name, tensor in passes.items()}
    if "logprobs" in passes:
        # Without them the trained policy is the one that played.
        old = batch.get("old_per_token_logps", passes["logprobs"])
        passes["difference"] = passes["logprobs"].double() - old.double()
    rows = {name: _short(tensor).tolist() for name, tensor in batch.items()}
    last = {name: _short(tensor).tolist() for name, tensor in passes.items()}
    result = []
    for number, episode in enumerate(episodes):
        columns = {name: values[number] for name, values in rows.items()}
        passed = {name: values[number] for name, values in last.items()}
        result.append(_line(episode, columns, passed, pieces))
    return result


def _line(
    episode: dict[str, Any], columns: dict[str, Any], passed: dict[str, Any], pieces: Pieces
) -> dict[str, Any]:
    facts = dict(episode)
    prompt, ids = facts.pop("ids", None) or _ids(facts["turn_spans"], columns)
    if "terminated" in columns:
        facts["terminated"] = columns["terminated"][0]
    if facts["truncated"] is None and facts["terminated"] is not None:
        facts["truncated"] = not facts["terminated"]
    figures = {} if "turn_index" not in columns else _figures(columns, passed, len(ids))
    if any(passed.get("seen", ())) and "weight" in passed:
        figures["weight"] = passed["weight"][0]
    spans = [tuple(span) for span in facts.pop("turn_spans")]
    traced = TracedEpisode(
        NOWHERE,
        **facts,
        **figures,
        turn_spans=spans,
        pieces=pieces([*prompt, *ids]),
        token_ids=[*prompt, *ids],
        prompt_tokens=len(prompt),
    )
    return traced.to_json()


def _ids(spans: list[list[int]], columns: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the ids of prompt and completion, without padding."""
    prompt = zip(columns["prompt_ids"], columns["prompt_mask"], strict=True)
    # TRL hides completions that it does not train on behind the mask too.
    length = max(sum(columns["completion_mask"]), spans[-1][1] if spans else 0)
    return [token for token, counts in prompt if counts], columns["completion_ids"][:length]


def _figures(columns: dict[str, Any], passed: dict[str, Any], length: int) -> dict[str, Any]:
    """Return the per-token values of an episode, with None for missing values."""
    turns, trains = columns["turn_index"][:length], columns["loss_mask"][:length]
    sampled = [turn >= 0 for turn in turns]
    seen = passed.get("seen", [False] * length)[:length]
    old = _where(sampled, columns.get("old_per_token_logps"))
    return {
        "turn_index": turns,
        "loss_mask": trains,
        "old_logprobs": old or _where(seen, passed.get("logprobs")),
        "token_log_ratio": _where(seen, passed.get("difference")),
        "log_ratio": _where(seen, passed.get("log_ratio")),
        "advantages": _where(trains, columns["advantages"]),
        "values": _where(sampled, columns.get("values")),
        "returns": _where(columns.get("value_mask", [])[:length], columns.get("returns")),
        "clipped": _where(seen, passed.get("clipped")),
    }


def _short(tensor: Tensor) -> Tensor:
    """Round a tensor to `DIGITS` significant digits, in float64."""
    if not tensor.is_floating_point():
        return tensor
    exact = tensor.double()
    decimals = (DIGITS - 1 - exact.abs().log10().floor()).nan_to_num(posinf=math.inf)
    scale = _POWERS[decimals.clamp(0, len(_POWERS) - 1).long()]
    # Smaller ones, zero among them, stay as they are.
    return torch.where(decimals < len(_POWERS), (exact * scale).round() / scale, exact)


def _where(mask: list[bool], values: list[Any] | None) -> Any:
    if values is None:
        return None
    # The mask ends with the episode, the values with the longest one of the batch.
    pairs = zip(mask, values, strict=False)
    return [value if there else None for there, value in pairs]
