"""Plain data of traced episodes: row, environment, rewards and end."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...rollout.engine import RolloutEngine
from ..loop.rollout import Rollout

# Longest text of a message or an error; an environment's text has no limit.
MAX_CHARACTERS = 100_000
# Longest column of a row that is recorded, as JSON.
SHORT = 200


def facts(
    rollout: Rollout,
    numbers: list[int],
    first: int,
    reward_names: Sequence[str],
    engine: RolloutEngine,
) -> list[dict[str, Any]]:
    """Return plain data of the contexts of some episodes; `first` numbers the process's first episode."""
    rewards = rollout.rewards.tolist()
    result = []
    for number in numbers:
        name = (first + number, 0) if rollout.names is None else rollout.names[number]
        pairs = zip(reward_names, rewards[number], strict=True)
        facts = {
            "row": name[0],
            "repetition": name[1],
            "prompt_id": prompt_id(rollout.rows[rollout.episodes[number].row]),
            "columns": short_columns(rollout.rows[rollout.episodes[number].row]),
            "seed": _seed(rollout, name),
            "score": rollout.earnings[number],
            "rewards": {key: None if math.isnan(value) else value for key, value in pairs},
            **_ending(rollout, number),
            **_conversation(rollout, number, engine),
        }
        contexts = rollout.episodes[number].contexts
        result += [{**facts, **_context(rollout, number, at)} for at in range(len(contexts))]
    return result


def cut(value: Any) -> Any:
    """Shorten the texts of plain data to at most `MAX_CHARACTERS`."""
    if isinstance(value, str):
        left_out = len(value) - MAX_CHARACTERS
        return value if left_out <= 0 else f"{value[:MAX_CHARACTERS]}[{left_out} more characters]"
    if isinstance(value, dict):
        return {str(key): cut(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [cut(item) for item in value]
    plain = isinstance(value, (bool, int, type(None))) or (
        isinstance(value, float) and math.isfinite(value)
    )
    return value if plain else cut(str(value))


def _seed(rollout: Rollout, name: tuple[int, int]) -> list[int] | None:
    """Return the seed of an episode, with the repetition in an evaluation."""
    if rollout.seed is None:
        return None
    return [*rollout.seed, *(name[:1] if rollout.names is None else name)]


def prompt_id(row: Mapping[str, Any]) -> str:
    """Return the row's `id`, else a hash of its prompt."""
    if row.get("id") is not None:
        return str(cut(row["id"]))
    prompt = json.dumps(row.get("prompt"), default=str)
    return hashlib.sha256(prompt.encode()).hexdigest()[:12]


def short_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the short columns of the row, without its prompt."""
    columns = {name: cut(value) for name, value in row.items() if name not in ("prompt", "id")}
    some = {name: value for name, value in columns.items() if value not in (None, "", [])}
    return {name: value for name, value in some.items() if len(json.dumps(value)) <= SHORT}


def _ending(rollout: Rollout, number: int) -> dict[str, Any]:
    episode = rollout.episodes[number]
    return {
        "success": episode.success,
        "terminated": episode.terminated,
        "truncated": not episode.terminated,
        "stop_reason": None if episode.stop_reason is None else str(episode.stop_reason),
        "error": cut(episode.error),
        "trains": episode.trains,
    }


def _conversation(rollout: Rollout, number: int, engine: RolloutEngine) -> dict[str, Any]:
    episode = rollout.episodes[number]
    if rollout.seed is None:  # episodes of a rollout_func have tokens alone
        return {"prompt": cut(rollout.rows[episode.row].get("prompt")), "messages": None}
    driver = engine.drivers[episode.name]
    return {
        "environment": episode.name or driver.type_name,
        "observations": "tool" if driver.tools else "environment",
        "prompt": cut(episode.prompt),
        "messages": cut(episode.messages),
        "pictures": cut(episode.pictures) if any(episode.pictures) else None,
    }


def _context(rollout: Rollout, number: int, at: int) -> dict[str, Any]:
    """Return the turns of a context, and its tokens unless a `rollout_func` played."""
    episode, paid = rollout.episodes[number], rollout.turn_rewards
    context, versions = episode.contexts[at], episode.policy_versions
    known = {"ids": [list(context.prompt_ids), list(context.ids)]}
    return {
        "context": at,
        "contexts": len(episode.contexts),
        "turns": None if len(episode.contexts) == 1 else list(context.turns),
        "turn_spans": [list(span) for span in context.turn_spans],
        "policy_versions": [versions[turn] for turn in context.turns] if versions else None,
        "turn_rewards": None if paid is None else [paid[number][turn] for turn in context.turns],
        **({} if rollout.seed is None else known),
    }
