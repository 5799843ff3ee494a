"""Checks the result of a user's `rollout_func` and makes episodes from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from ..errors import TurnSpanError
from .chat import Message
from .episode import Context, Episode
from .record import check_reward

RolloutFunc = Callable[[list[Any], Any], dict[str, Any]]
# Required keys of a result, in TRL's form.
NEEDED = ("prompt_ids", "completion_ids", "logprobs")
# Optional keys with one entry per row; TRL has only the first key.
RECORD = ("env_mask", "turn_spans", "turn_rewards", "terminated", "truncated", "episode_of")


def read_rollout(
    output: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    prompts: Sequence[Any],
    eos_token_ids: Sequence[int],
    read: Callable[[list[int], list[int]], Message],
) -> tuple[list[Episode], dict[str, Any]]:
    """Convert the result of a `rollout_func` to episodes.

    The result has TRL's keys (`prompt_ids`, `completion_ids`, `logprobs`, optional `env_mask`) and, optional,
    `turn_spans`, `turn_rewards`, `terminated`, `truncated`, one entry per row. A row is an episode, or, with
    `episode_of`, a context of the episode with this number; its turns follow the turns of the rows before it.
    An episode whose last row ends with one of `eos_token_ids` has terminated, unless `terminated` or
    `truncated` is given.
    """
    columns = {key: value for key, value in output.items() if key not in (*NEEDED, *RECORD)}
    owners = _check(output, len(rows))
    completions, logprobs = output["completion_ids"], output["logprobs"]
    spans = _spans(output, completions)
    episodes: dict[int, Episode] = {}
    for row, (number, ids) in enumerate(zip(owners, completions, strict=True)):
        prompt_ids, ids = list(output["prompt_ids"][row]), [int(i) for i in ids]
        context: Context = Context()
        if number in episodes:
            episodes[number].more.append(context)
        else:
            context = episodes[number] = Episode(number, dict(rows[number]), prompts[number])
        episode = episodes[number]
        context.prompt_ids = prompt_ids
        end, of_row = 0, None if logprobs is None else logprobs[row]
        for start, stop in [*spans[row], (len(ids), len(ids))]:
            if start > end:
                context.append_observation(ids[end:start])
            if stop > start:
                sampled = None if of_row is None else list(of_row[start:stop])
                episode.append_turn(ids[start:stop], sampled, context)
            end = stop
        episode.messages.append(read(ids, prompt_ids))
        episode.terminated = ids[-1] in eos_token_ids
        if output.get("terminated") is not None:
            episode.terminated = bool(output["terminated"][row])
        elif output.get("truncated") is not None:
            episode.terminated = not output["truncated"][row]
        if output.get("turn_rewards") is not None:
            rewards, name = output["turn_rewards"][row], f"turn_rewards[{row}]"
            if len(rewards) != len(context.turns):
                raise ValueError(f"`{name}` has {len(rewards)} entries for {len(context.turns)} turns.")
            for place, reward in enumerate(rewards):
                checked = check_reward(reward, f"{name}[{place}]")
                episode.turn_rewards[context.turns[place]] = checked
            episode.has_turn_rewards = True
    return [episodes[number] for number in range(len(rows))], columns


def _check(output: dict[str, Any], count: int) -> list[int]:
    """Raise ValueError if the result lacks keys or entries. Return the episode number of each row."""
    missing = [key for key in NEEDED if key not in output]
    if missing:
        raise ValueError(f"rollout_func must return keys {missing} in its output dict.")
    lengths = [len(ids) for ids in output["completion_ids"]]
    given = output.get("episode_of")
    owners = [*range(len(lengths))] if given is None else [int(number) for number in given]
    if set(owners) != set(range(count)):
        name = "completion_ids" if given is None else "episode_of"
        raise ValueError(f"`{name}` of `rollout_func` needs a row for each of {count} prompts, and no other.")
    if 0 in lengths:
        raise ValueError(f"`completion_ids[{lengths.index(0)}]` is empty.")
    for key in (*NEEDED, *RECORD):
        value, by_token = output.get(key), key in ("env_mask", "logprobs")
        if value is None:
            continue
        if len(value) != len(lengths) or (by_token and list(map(len, value)) != lengths):
            raise ValueError(f"`{key}` needs an entry per row{' and token' * by_token}.")
    return owners


def _spans(output: dict[str, Any], completions: list[list[int]]) -> list[list[tuple[int, int]]]:
    """Return each row's turn spans: the given spans, or else the mask's runs, or else the whole row."""
    given, masks = output.get("turn_spans"), output.get("env_mask")
    if given is None and masks is None:
        return [[(0, len(ids))] for ids in completions]
    if given is None:
        return [_runs([bool(flag) for flag in mask]) for mask in output["env_mask"]]
    for row, (spans, ids) in enumerate(zip(given, completions, strict=True)):
        previous = 0
        for turn, (start, end) in enumerate(spans):
            if not (previous <= start < end <= len(ids)):
                raise TurnSpanError(
                    f"`turn_spans[{row}][{turn}]` is ({start}, {end}); allowed are half-open spans of the "
                    f"completion with {previous} <= start < end <= {len(ids)}."
                )
            previous = end
        cover = {position for start, end in spans for position in range(start, end)}
        if masks is not None and {at for at, flag in enumerate(masks[row]) if flag} != cover:
            raise TurnSpanError(f"`turn_spans[{row}]` contradicts `env_mask[{row}]`.")
    return [[(int(start), int(end)) for start, end in spans] for spans in given]


def _runs(mask: list[bool]) -> list[tuple[int, int]]:
    """Return the runs of True in a mask, as half-open spans."""
    edges = [n for n, (a, b) in enumerate(pairwise([False, *mask, False])) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))
