"""Records of episodes for the trace, each a dictionary with the fields of `TracedEpisode`."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...rollout.engine import RolloutEngine
from ...trace.format import DIGITS
from ..bridge import Bridge
from ..loop.rollout import Rollout

# Longest text of a message or an error; an environment's text has no limit.
MAX_CHARACTERS = 100_000
# Longest column of a row that is recorded, as JSON.
SHORT = 200
# Per-token field -> the column of its mask and of its values. A value off the mask is None.
FIGURES = {
    "old_logprobs": ("sampled", "old_per_token_logps"),
    "token_log_ratio": ("seen", "difference"),
    "log_ratio": ("seen", "log_ratio"),
    "advantages": ("loss_mask", "advantages"),
    "values": ("sampled", "values"),
    "returns": ("value_mask", "returns"),
    "clipped": ("seen", "clipped"),
}
# The powers of ten that float64 represents exactly.
_POWERS = torch.tensor([10.0**power for power in range(23)], dtype=torch.float64)


def begin_records(
    host: Bridge, rollout: Rollout, numbers: Sequence[int], engine: RolloutEngine
) -> list[dict[str, Any]]:
    """Return records of some episodes, one per context, with all that is known before the update.

    `ids` holds the ids of prompt and completion.
    """
    first = host.accelerator.process_index * len(rollout.episodes)
    scores, by_turn, records = rollout.rewards.tolist(), rollout.turn_rewards, []
    for number in numbers:
        episode = rollout.episodes[number]
        row, versions = rollout.rows[episode.row], episode.policy_versions
        # In an evaluation the row of the data set, and the repetition.
        key = [first + number] if rollout.names is None else [*rollout.names[number]]
        rewards = zip(host.reward_func_names, scores[number], strict=True)
        record = {
            "row": key[0],
            "repetition": key[1] if len(key) > 1 else 0,
            "prompt_id": _prompt_id(row),
            "columns": _short_columns(row),
            "seed": None if rollout.seed is None else [*rollout.seed, *key],
            "score": rollout.earnings[number],
            "rewards": {name: None if math.isnan(value) else value for name, value in rewards},
            "success": episode.success,
            "terminated": episode.terminated,
            "stop_reason": None if episode.stop_reason is None else str(episode.stop_reason),
            "error": _plain(episode.error),
            "trains": episode.trains,
            "contexts": len(episode.contexts),
            "prompt": _plain(episode.prompt),
            "messages": _plain(episode.messages),
        }
        # A `rollout_func` has no driver.
        if rollout.seed is not None:
            driver = engine.drivers[episode.name]
            record["environment"] = episode.name or driver.type_name
            record["observations"] = "tool" if driver.tools else "environment"
            record["pictures"] = _plain(episode.pictures) if any(episode.pictures) else None
        for at, context in enumerate(episode.contexts):
            turns = context.turns
            own: dict[str, Any] = {
                "context": at,
                "ids": [context.prompt_ids, context.ids],
                "turn_spans": context.turn_spans,
                "turns": turns if episode.more else None,
                "turn_rewards": by_turn and [by_turn[number][turn] for turn in turns],
                "policy_versions": [versions[turn] for turn in turns] if versions else None,
            }
            records.append(record | own)
    return records


def complete_records(
    records: list[dict[str, Any]],
    batch: dict[str, Tensor],
    passes: dict[str, Tensor],
    pieces: Callable[[list[int]], list[str]],
) -> list[dict[str, Any]]:
    """Add tokens and per-token values to records, from their rows of the rollout batch, [N, T].

    `passes`, of the last pass over them, [N or more, T]: `logprobs`, `log_ratio`, `clipped`, the episode's
    `weight`, and `seen`, whether there was a pass. Empty without a pass. `pieces` cuts the text.
    """
    # The only synchronisation with the device.
    table = {name: tensor.cpu()[: len(records)] for name, tensor in (batch | passes).items()}
    if "turn_index" in table:
        table["sampled"] = table["turn_index"] >= 0
    figures = dict(FIGURES)
    if "logprobs" in table and "old_per_token_logps" not in table:
        # The trained policy is the one that played.
        figures["old_logprobs"] = ("seen", "logprobs")
    if "logprobs" in table:
        old = table[figures["old_logprobs"][1]]
        table["difference"] = table["logprobs"].double() - old.double()
    columns = {name: _rounded(tensor).tolist() for name, tensor in table.items()}
    for number, record in enumerate(records):
        prompt, ids = record.pop("ids")
        record |= {"token_ids": [*prompt, *ids], "prompt_tokens": len(prompt)}
        record["pieces"] = pieces(record["token_ids"])
        own = {name: rows[number][: len(ids)] for name, rows in columns.items()}
        record["loss_mask"] = own.get("loss_mask")
        for name, (mask, values) in figures.items():
            if mask in own and values in own:
                pairs = zip(own[mask], own[values], strict=True)
                record[name] = [value if there else None for there, value in pairs]
        if "weight" in own and any(own["seen"]):
            record["weight"] = own["weight"][0]
    return records


def _plain(value: Any) -> Any:
    """Return plain JSON data whose texts have at most `MAX_CHARACTERS`."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    finite = isinstance(value, float) and math.isfinite(value)
    if value is None or isinstance(value, (bool, int)) or finite:
        return value
    text, left_out = str(value), len(str(value)) - MAX_CHARACTERS
    return text if left_out <= 0 else f"{text[:MAX_CHARACTERS]}[{left_out} more characters]"


def _prompt_id(row: Mapping[str, Any]) -> str:
    """Return the row's `id`, else a hash of its prompt."""
    if row.get("id") is not None:
        return str(_plain(row["id"]))
    prompt = json.dumps(row.get("prompt"), default=str)
    return hashlib.sha256(prompt.encode()).hexdigest()[:12]


def _short_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the short columns of the row, without its prompt."""
    some = {name: _plain(value) for name, value in row.items() if name not in ("prompt", "id")}
    some = {name: value for name, value in some.items() if value not in (None, "", [])}
    return {name: value for name, value in some.items() if len(json.dumps(value)) <= SHORT}


def _rounded(tensor: Tensor) -> Tensor:
    """Round a tensor to `DIGITS` significant digits, in float64."""
    if not tensor.is_floating_point():
        return tensor
    exact = tensor.double()
    decimals = (DIGITS - 1 - exact.abs().log10().floor()).nan_to_num(posinf=math.inf)
    scale = _POWERS[decimals.clamp(0, len(_POWERS) - 1).long()]
    # Smaller ones, zero among them, stay as they are.
    return torch.where(decimals < len(_POWERS), (exact * scale).round() / scale, exact)
