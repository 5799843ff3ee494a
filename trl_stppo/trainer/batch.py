"""The batch: its fields, and functions that join it, split it and deal it into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import torch
from torch import Tensor

from ..core.turns import turn_index_from_spans
from ..rollout.episode import Episode
from ._trl import pad, shuffle_sequence_dict, split_tensor_dict


class Batch(TypedDict, total=False):
    """Episodes as tensors, [B, P] before and [B, T] after the end of the prompt."""

    # [B, P] int64, padded on the left.
    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor  # [B, T] int64, padded on the right: turns and what lies between them
    # [B, T] int, 0 past an episode's end, and throughout episodes that `mask_truncated_completions` hides.
    completion_mask: Tensor
    tool_mask: Tensor  # [B, T] int, 0 at observations, and throughout hidden episodes
    # [], tokens of the policy in the rollout batch, over all processes. It and `tool_mask` are for
    # subclasses that use TRL's names; our loss uses `loss_mask`.
    num_items_in_batch: Tensor
    turn_index: Tensor  # [B, T] int64, k inside turn k, -1 elsewhere
    loss_mask: Tensor  # [B, T] bool, tokens that train
    old_per_token_logps: Tensor  # [B, T] nats, log-probabilities when sampled
    # [B, T] nats, the sampler's own log-probabilities; NaN if it gave none.
    sampling_per_token_logps: Tensor
    # [B, T] or [B, 1], constant weights that correct for the difference of these two.
    importance_sampling_ratio: Tensor
    ref_per_token_logps: Tensor  # [B, T] nats, of the reference policy
    # [B, T] reward units, the critic's before the update, and its targets.
    values: Tensor
    returns: Tensor
    value_mask: Tensor  # [B, T] bool, True at the critic's regression targets
    advantages: Tensor  # [B, T], as they enter the loss; 0 off `loss_mask`
    trace_row: Tensor  # [B] int64, row of the trace; present while the update is recorded
    # [B, K] int64, version of the policy that sampled each turn; absent if one policy plays all of a
    # rollout.
    policy_version: Tensor


@dataclass
class TurnBatch:
    """The turn structure of a local rollout batch."""

    turn_index: Tensor  # [B, T] int64, k at the tokens of turn k, -1 elsewhere
    turn_rewards: Tensor | None  # [B, K] float, 0 where an episode has fewer turns, or None
    terminated: Tensor  # [B] bool, the task's own end

    @property
    def action_mask(self) -> Tensor:
        """[B, T] bool, True where the policy sampled the token."""
        return self.turn_index >= 0

    def earned(self, scores: Tensor) -> Tensor:
        """Total rewards of episodes, [B]: score plus turn rewards; hidden turns count as 0."""
        return scores if self.turn_rewards is None else scores + self.turn_rewards.sum(dim=1)


@dataclass(frozen=True)
class Targets:
    """Per-token targets of one rollout batch, all [B, T]."""

    rewards: Tensor  # reward units, as they enter GAE
    raw_advantages: Tensor  # before whitening
    advantages: Tensor  # as they enter the loss; 0 off `loss_mask`
    values: Tensor  # the critic's values before the update
    returns: Tensor  # regression targets; meaningful on `value_mask`
    value_mask: Tensor  # bool, True at the critic's regression targets


def collate(
    episodes: Sequence[Episode],
    *,
    pad_token_id: int,
    multiple_of: int | None,
    device: torch.device,
    has_logprobs: bool,
    hidden: Sequence[bool],
) -> Batch:
    """Pad the tokens of episodes.

    Both widths are multiples of `multiple_of`; None allows any. No token of a `hidden` episode counts.
    """

    def padded(rows: list[list[Any]], value: float, side: str = "right") -> Tensor:
        tensors = [torch.tensor(row) for row in rows]
        return pad(
            tensors, padding_value=value, padding_side=side, pad_to_multiple_of=multiple_of
        ).to(device)

    prompts, completions = [e.prompt_ids for e in episodes], [e.ids for e in episodes]
    shown = torch.tensor([not flag for flag in hidden], device=device).unsqueeze(1).int()
    batch: Batch = {
        "prompt_ids": padded(prompts, pad_token_id, "left"),
        "prompt_mask": padded([[1] * len(ids) for ids in prompts], 0, "left"),
        "completion_ids": padded(completions, pad_token_id),
        "completion_mask": padded([[1] * len(ids) for ids in completions], 0) * shown,
        "tool_mask": padded([[int(flag) for flag in e.action_mask] for e in episodes], 1) * shown,
    }
    if has_logprobs:
        # vLLM gives None if it has no number.
        rows = [[float("nan") if x is None else x for x in e.logprobs] for e in episodes]
        batch["sampling_per_token_logps"] = padded(rows, 0.0)
    return batch


def build_turn_batch(
    episodes: Sequence[Episode],
    turn_rewards: Sequence[Sequence[float]] | None,
    completion_mask: Tensor,
    dtype: torch.dtype,
) -> TurnBatch:
    """Collate the turns of episodes.

    Args:
        episodes: episodes of the batch, in its order.
        turn_rewards: reward of each turn of each episode, reward units; None without turn rewards.
        completion_mask: [B, T], 0 past an episode's end, and 0 throughout a hidden episode.
        dtype: dtype of the rewards.
    """
    device = completion_mask.device
    spans = [episode.turn_spans for episode in episodes]
    turn_index = turn_index_from_spans(spans, completion_mask.size(1), device=device)
    turn_index = turn_index.masked_fill(~completion_mask.bool(), -1)
    rewards = None if turn_rewards is None else _padded(turn_rewards, turn_index, dtype)
    terminated = torch.tensor([episode.terminated for episode in episodes], device=device)
    return TurnBatch(turn_index, rewards, terminated)


def _padded(
    turn_rewards: Sequence[Sequence[float]], turn_index: Tensor, dtype: torch.dtype
) -> Tensor:
    """Turn rewards as [B, K]; a hidden episode has no turn in the index, so none of its rewards count."""
    counts = (turn_index.amax(dim=1) + 1).tolist()
    table = torch.zeros(len(turn_rewards), max(1, *counts), dtype=dtype)
    for episode, (rewards, turns) in enumerate(zip(turn_rewards, counts, strict=True)):
        if turns:
            table[episode, :turns] = torch.tensor(rewards, dtype=dtype)
    return table.to(turn_index.device)


def full_sequence(batch: Batch) -> tuple[Tensor, Tensor, int]:
    """Ids and mask of prompt and completion [B, P + T], and T."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return ids, mask, batch["completion_ids"].size(1)


def episode_tokens(batch: Batch) -> Tensor:
    """Tokens of prompt and completion of each episode, [B]."""
    return batch["prompt_mask"].sum(dim=1) + batch["completion_mask"].sum(dim=1)


def deal(batches: Sequence[Batch], count: int) -> list[Batch]:
    """Shuffle episodes into `count` micro-batches of one size; the input may be dealt out already."""
    dealt = split_tensor_dict(shuffle_sequence_dict(join(batches)), count)
    return cast(list[Batch], dealt)


def group_by_length(batches: list[Batch]) -> list[Batch]:
    """Deal the episodes of one mini-batch into its micro-batches by length, shortest first.

    The mini-batch's gradient is a sum over episodes, so only the padding changes.
    """
    if len(batches) == 1:
        return batches
    joined = join(batches)
    order = episode_tokens(joined).argsort(stable=True)
    return cast(list[Batch], split_tensor_dict(take_rows(joined, order), len(batches)))


def take_rows(batch: Batch, rows: Tensor) -> Batch:
    """Select episodes of a batch, in this order; fields that are not per episode stay unchanged."""
    return cast(Batch, {key: _take(value, rows) for key, value in batch.items()})


def join(batches: Sequence[Batch]) -> Batch:
    """Join the episodes of batches, in their order."""
    if len(batches) == 1:
        return batches[0]
    joined: dict[str, Any] = {}
    for key, first in batches[0].items():
        parts = [cast(dict[str, Any], batch)[key] for batch in batches]
        if isinstance(first, Tensor) and first.ndim > 0:
            joined[key] = torch.cat(parts)
        elif isinstance(first, list):
            joined[key] = [item for part in parts for item in part]
        else:
            joined[key] = first
    return cast(Batch, joined)


def without_padding(batch: Batch) -> Batch:
    """The batch without the final columns that are padding in all of its episodes.

    The rollout batch is padded to its longest episode, which few micro-batches hold.
    """
    width = batch["completion_mask"].size(1)
    length = max(1, int(batch["completion_mask"].sum(dim=1).max()))
    short = {
        key: value[:, :length]
        if isinstance(value, Tensor)
        and value.ndim == 2
        and value.size(1) == width
        and key not in ("prompt_ids", "prompt_mask")
        else value
        for key, value in batch.items()
    }
    return cast(Batch, short)


def _take(value: Any, order: Tensor) -> Any:
    if isinstance(value, Tensor) and value.ndim > 0:
        return value[order]
    return [value[i] for i in order.tolist()] if isinstance(value, list) else value
