"""From tensors of a rollout batch and its update to the lines of a trace file."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..trace.format import TracedEpisode, TracedUpdate
from ..trace.pieces import TokenPieces

# Lines do not hold the update, so any will do.
NOWHERE = TracedUpdate("train", "train", 0, 0)


def lines(
    episodes: list[dict[str, Any]],
    batch: dict[str, Tensor],
    passes: dict[str, Tensor],
    pieces: TokenPieces,
) -> list[dict[str, Any]]:
    """One line per episode.

    Args:
        episodes: `trace_facts.facts`.
        batch: their rows of the rollout batch, [N, T].
        passes: of the last pass over them, [N or more, T]: `logprobs`, `log_ratio`, `clipped`, and
            `seen`, whether there was a pass. Empty where there was none.
        pieces: cuts the text.
    """
    # The one wait for the device.
    rows = {name: tensor.tolist() for name, tensor in batch.items()}
    last = {name: tensor.tolist() for name, tensor in passes.items()}
    result = []
    for number, episode in enumerate(episodes):
        own = {name: values[number] for name, values in rows.items()}
        passed = {name: values[number] for name, values in last.items()}
        result.append(_line(episode, own, passed, pieces))
    return result


def _line(
    episode: dict[str, Any], own: dict[str, Any], passed: dict[str, Any], pieces: TokenPieces
) -> dict[str, Any]:
    facts = dict(episode)
    prompt, ids = facts.pop("ids", None) or _ids(facts["turn_spans"], own)
    if "terminated" in own:
        facts["terminated"] = own["terminated"][0]
    if facts["truncated"] is None and facts["terminated"] is not None:
        facts["truncated"] = not facts["terminated"]
    figures = {} if "turn_index" not in own else _figures(own, passed, len(ids))
    spans = [tuple(span) for span in facts.pop("turn_spans")]
    whole = TracedEpisode(
        NOWHERE,
        **facts,
        **figures,
        turn_spans=spans,
        pieces=pieces([*prompt, *ids]),
        token_ids=[*prompt, *ids],
        prompt_tokens=len(prompt),
    )
    return whole.to_json()


def _ids(spans: list[list[int]], own: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Prompt and completion without padding."""
    prompt = zip(own["prompt_ids"], own["prompt_mask"], strict=True)
    # TRL hides completions that it does not train on behind the mask too.
    length = max(sum(own["completion_mask"]), spans[-1][1] if spans else 0)
    return [token for token, counts in prompt if counts], own["completion_ids"][:length]


def _figures(own: dict[str, Any], passed: dict[str, Any], length: int) -> dict[str, Any]:
    """Per-token figures, None where there are none."""
    turns, trains = own["turn_index"][:length], own["loss_mask"][:length]
    sampled = [turn >= 0 for turn in turns]
    seen = passed.get("seen", [False] * length)[:length]
    new = _where(seen, passed.get("logprobs"))
    ratio = _where(seen, passed.get("log_ratio"))
    # Without them the policy that is trained is the one that has played.
    old = _where(sampled, own.get("old_per_token_logps")) or new
    difference = None
    if new is not None and old is not None:
        pairs = zip(new, old, strict=True)
        difference = [None if n is None or o is None else n - o for n, o in pairs]
    return {
        "turn_index": turns,
        "loss_mask": trains,
        "old_logprobs": old,
        "token_log_ratio": difference,
        "log_ratio": ratio,
        "advantages": _where(trains, own["advantages"]),
        "values": _where(sampled, own.get("values")),
        "returns": _where(own.get("value_mask", [])[:length], own.get("returns")),
        "clipped": _where(seen, passed.get("clipped")),
    }


def _where(mask: list[bool], values: list[Any] | None) -> Any:
    if values is None:
        return None
    # The mask ends with the episode, the values with the longest one of the batch.
    pairs = zip(mask, values, strict=False)
    return [value if there else None for there, value in pairs]
