"""What a trace says of an episode beyond its tensors: its row, its environment, how it ended."""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ppo_trainer import PPOTrainer

# Longest text of a message or an error; an environment may say anything.
MAX_CHARACTERS = 100_000


def facts(trainer: PPOTrainer, rows: list[int], first_row: int) -> list[dict[str, Any]]:
    """Plain data of some episodes of the batch that has just been played and scored.

    Args:
        trainer: holds the batch's record.
        rows: positions in the batch of this process.
        first_row: number of the first of them all among the rows of all processes.
    """
    rewards = trainer._local_rewards.tolist()
    names = trainer._names
    found = []
    for row in rows:
        name = (first_row + row, 0) if names is None else names[row]
        found.append(
            {
                "row": name[0],
                "repetition": name[1],
                "prompt_id": _prompt_id(trainer, row),
                "seed": _seed(trainer, name) if trainer._episodes else None,
                "score": trainer.last_scores[row],
                "rewards": _rewards(trainer, rewards[row]),
                **_ending(trainer, row),
                **_conversation(trainer, row),
            }
        )
    return found


def cut(value: Any) -> Any:
    """The same data with texts of at most `MAX_CHARACTERS`."""
    if isinstance(value, str):
        left_out = len(value) - MAX_CHARACTERS
        return value if left_out <= 0 else f"{value[:MAX_CHARACTERS]}[{left_out} more characters]"
    if isinstance(value, dict):
        return {str(key): cut(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [cut(item) for item in value]
    return value if isinstance(value, (bool, int, float, type(None))) else cut(str(value))


def _seed(trainer: PPOTrainer, name: tuple[int, int]) -> list[int]:
    """As the rollout engine names it: by row, and in an evaluation by repetition too."""
    return [*trainer._rollout_seed(), *(name[:1] if trainer._names is None else name)]


def _prompt_id(trainer: PPOTrainer, row: int) -> str:
    given = trainer._columns[row].get("id")
    if given is not None:
        return str(cut(given))
    prompt = json.dumps(trainer._rows[row].get("prompt"), default=str)
    return hashlib.sha256(prompt.encode()).hexdigest()[:12]


def _rewards(trainer: PPOTrainer, values: list[float]) -> dict[str, float | None]:
    pairs = zip(trainer.reward_func_names, values, strict=True)
    return {name: None if math.isnan(value) else value for name, value in pairs}


def _ending(trainer: PPOTrainer, row: int) -> dict[str, Any]:
    record = trainer._record

    def said(values: list[Any] | None) -> Any:
        return None if values is None else values[row]

    reason = said(record.stop_reasons)
    trains = said(record.trains)
    return {
        "turn_spans": [list(span) for span in said(record.turn_spans) or []],
        "turn_rewards": said(record.turn_rewards),
        "success": said(record.success),
        "terminated": said(record.terminated),
        "truncated": said(record.truncated),
        "stop_reason": None if reason is None else str(reason),
        "error": cut(said(record.errors)),
        "trains": True if trains is None else trains,
    }


def _conversation(trainer: PPOTrainer, row: int) -> dict[str, Any]:
    if trainer._episodes is None:
        return {"prompt": cut(trainer._rows[row].get("prompt")), "messages": None}
    episode = trainer._episodes[row]
    engine = trainer._engine if trainer.model.training else trainer._eval_engine
    assert engine is not None
    driver = engine.drivers[episode.name]
    return {
        "environment": episode.name or driver.type_name,
        "observations": "tool" if driver.tools else "environment",
        "prompt": cut(episode.prompt),
        "messages": cut(episode.messages),
        "ids": [list(episode.prompt_ids), list(episode.ids)],
    }
