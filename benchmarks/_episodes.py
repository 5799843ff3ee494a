"""Batches of fixed episodes, which of their turns get clipped, and trainers that always get them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from datasets import Dataset
from geometries import episode_lengths
from transformers import AutoTokenizer

# Settings of a trainer that leaves nothing behind.
QUIET = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
Episode = dict[str, Any]
# Tokens that mean nothing special to the benchmark's tokenizer, and fit every geometry.
FIRST_ID, LAST_ID = 32, 299
FEW = 0.05
SHORTEST = 24  # room for three turns


def make_episodes(
    count: int, longest: int, eos: int, *, equal: bool = False, prompt: int | None = None
) -> list[Episode]:
    """A prompt, then a short turn, a long one and half of all sampled tokens in the last.

    The prompt is a quarter if its tokens are not given. Between the turns the environment speaks for an
    eighth of the completion each time. `equal` makes all episodes as long as the longest.
    """
    draw = random.Random(1)
    episodes = []
    lengths = [longest] * count if equal else episode_lengths(count, longest)
    for length in (max(SHORTEST, length) for length in lengths):
        first = prompt or max(4, length // 4)
        completion = length - first
        observed = max(1, completion // 8)
        sampled = completion - 2 * observed
        few, last = max(1, round(FEW * sampled)), round(sampled / 2)
        spans, at = [], 0
        for turn in (few, sampled - few - last, last):
            spans.append([at, at + turn])
            at += turn + observed
        ids = [draw.randint(FIRST_ID, LAST_ID) for _ in range(length)]
        ids[-1] = eos
        episodes.append({"prompt_ids": ids[:first], "completion_ids": ids[first:], "turn_spans": spans})
    return episodes


def prefix_episodes(prefix: int, count: int, longest: int, eos: int, *, ragged: bool) -> list[Episode]:
    """Make episodes of one turn behind a common prompt of `prefix` tokens, log-normal if `ragged`."""
    draw = random.Random(1)
    prompt = [draw.randint(FIRST_ID, LAST_ID) for _ in range(prefix)]
    episodes = []
    for length in episode_lengths(count, longest) if ragged else [longest] * count:
        # Without a common prefix each row has a token of its own in front.
        first = prompt or [draw.randint(FIRST_ID, LAST_ID)]
        ids = [*(draw.randint(FIRST_ID, LAST_ID) for _ in range(length - 1)), eos]
        episodes.append({"prompt_ids": first, "completion_ids": ids, "turn_spans": [[0, length]]})
    return episodes


def tokens(episodes: list[Episode]) -> int:
    """Prompt and completion, without padding."""
    return sum(len(e["prompt_ids"]) + len(e["completion_ids"]) for e in episodes)


def clip_cases(episodes: list[Episode]) -> dict[str, dict[int, list[int]]]:
    """Name of the case -> row -> turns that are to be clipped."""
    rows = range(len(episodes))
    by_length = sorted(rows, key=lambda row: len(episodes[row]["completion_ids"]))
    count = max(1, round(FEW * len(episodes)))
    middle = (len(rows) - count) // 2
    return {
        "none": {},
        "5% of the episodes": {row: [0, 1, 2] for row in by_length[middle : middle + count]},
        "5% of the tokens, everywhere": {row: [0] for row in rows},
        "half of the tokens": {row: [2] for row in rows},
    }


def clipped_share(episodes: list[Episode], case: dict[int, list[int]]) -> float:
    """Share of all sampled tokens that the case clips."""
    sampled = sum(end - start for e in episodes for start, end in e["turn_spans"])
    spans = (episodes[row]["turn_spans"][turn] for row, turns in case.items() for turn in turns)
    return sum(end - start for start, end in spans) / sampled


def clip_turns(batch: dict[str, Any], episodes: list[Episode], case: Mapping[Any, list[int]]) -> None:
    """Make exactly the turns of the case clipped: their ratio is e, their advantage positive."""
    for row, turns in case.items():
        for turn in turns:
            start, end = episodes[int(row)]["turn_spans"][turn]
            batch["old_per_token_logps"][int(row), start:end] -= 1.0
            batch["advantages"][int(row), start:end] = 1.0


def fixed(model: str, episodes: list[Episode]) -> dict[str, Any]:
    """Return the arguments with which a trainer, ours or TRL's, gets the same episodes in every rollout."""
    columns: dict[str, Any] = {name: [e[name] for e in episodes] for name in episodes[0]}
    columns["turn_spans"] = [[tuple(s) for s in spans] for spans in columns["turn_spans"]]
    columns["env_mask"] = [[0] * len(ids) for ids in columns["completion_ids"]]
    for mask, spans in zip(columns["env_mask"], columns["turn_spans"], strict=True):
        for start, end in spans:
            mask[start:end] = [1] * (end - start)
    return {
        "model": model,
        "processing_class": AutoTokenizer.from_pretrained(model, padding_side="left"),
        "reward_funcs": lambda completions, **_: [float(i % 3) for i in range(len(completions))],
        # Rows for several processes and updates.
        "train_dataset": Dataset.from_list([{"prompt": "one two"}] * (16 * len(episodes))),
        "rollout_func": lambda prompts, trainer: {**columns, "logprobs": None},
    }
