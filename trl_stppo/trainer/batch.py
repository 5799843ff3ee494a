"""Batches as tensors: their fields, and functions that join, split and shuffle them.

A batch's rows are contexts; an episode that never rewrote its context is one row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, cast

import torch
from torch import Tensor

from ..core import JoinedView, turn_index_from_spans
from ..rollout.episode import Context, Episode
from ._trl import pad


class Batch(TypedDict, total=False):
    """Tensors of a batch of contexts: prompts [B, P] and completions [B, T].

    Attributes:
        prompt_ids: [B, P] int64, padded on the left.
        completion_ids: [B, T] int64, padded on the right: turns and what lies between them.
        completion_mask: [B, T] int, 0 past an episode's end, and throughout episodes that
            `mask_truncated_completions` hides.
        tool_mask: [B, T] int, 0 at observations, and throughout hidden episodes. It is for subclasses
            that use TRL's names; our loss uses `loss_mask`.
        turn_index: [B, T] int64, k inside turn k, -1 elsewhere.
        loss_mask: [B, T] bool, tokens that train.
        old_per_token_logps: [B, T] nats, by training's forward pass, under the weights that played;
            absent if one step trains on the whole rollout and nothing else needs them.
        start_per_token_logps: [B, T] nats, under the weights at the start of the update; present if a
            trust region measures the KL and rollouts are stale.
        sampling_per_token_logps: [B, T] nats, the sampler's own log-probabilities; NaN if it gave
            none.
        importance_sampling_ratio: [B, T] or [B, 1], constant weights that correct for the
            difference between sampler and training.
        ref_per_token_logps: [B, T] nats, of the reference policy.
        values, returns: [B, T] reward units, the critic's values before the update, and its targets.
        value_mask: [B, T] bool, True at the critic's regression targets.
        advantages: [B, T], as they enter the loss; 0 off `loss_mask`.
        trace_row: [B] int64, row of the trace; present while the update is recorded.
        episode, episode_tokens: [B] each, present if an episode has several contexts: index of the
            row's episode (-1 at padding rows), and number of the episode's tokens in the loss.
        episode_weights: [B], the weights by `stabilizers`, if one of them weighs episodes.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    tool_mask: Tensor
    turn_index: Tensor
    loss_mask: Tensor
    old_per_token_logps: Tensor
    start_per_token_logps: Tensor
    sampling_per_token_logps: Tensor
    importance_sampling_ratio: Tensor
    ref_per_token_logps: Tensor
    values: Tensor
    returns: Tensor
    value_mask: Tensor
    advantages: Tensor
    trace_row: Tensor
    episode: Tensor
    episode_tokens: Tensor
    episode_weights: Tensor


# Fields that `TurnBatch.join` joins, and fields that `split` returns.
READ = (
    *("completion_mask", "tool_mask", "old_per_token_logps", "sampling_per_token_logps"),
    *("ref_per_token_logps", "values"),
)
ADDED = ("loss_mask", "importance_sampling_ratio", "returns", "value_mask", "advantages")


@dataclass
class TurnBatch:
    """Turns, turn rewards and endings of the episodes in this process's rollout batch.

    Attributes:
        turn_index: [B, T] int64, k at the tokens of turn k, -1 elsewhere.
        turn_rewards: [B, K] float, 0 where an episode has fewer turns, or None.
        terminated: [B] bool, True if no state can follow the episode.
        row_index: [N, T] int64, `turn_index` of the batch's rows, numbered from 0 in each.
        episodes: [N] int64, index of each row's episode, -1 at padding rows.
        view: the joined rows, if an episode has several contexts.
    """

    turn_index: Tensor
    turn_rewards: Tensor | None
    terminated: Tensor
    row_index: Tensor
    episodes: Tensor
    view: JoinedView | None = None

    @property
    def action_mask(self) -> Tensor:
        """Return a [B, T] bool mask, True where the policy sampled the token."""
        return self.turn_index >= 0

    def totals(self, scores: Tensor) -> Tensor:
        """Add each episode's turn rewards to `scores`, [B]; hidden turns count as 0."""
        return scores if self.turn_rewards is None else scores + self.turn_rewards.sum(dim=1)

    def join(self, batch: Batch) -> Batch:
        """Join the contexts of each episode; return a batch with one row per episode.

        If every episode has one context, that is `batch` itself.
        """
        if self.view is None:
            return batch
        fields = cast(dict[str, Tensor], batch)
        joined = {name: self.view.join(fields[name]) for name in READ if name in batch}
        return cast(Batch, joined | {"turn_index": self.turn_index})

    def split(self, joined: Batch, batch: Batch) -> Batch:
        """Split the new fields of `joined`, a row per episode, and add them to `batch`, a row per context."""
        if self.view is None:
            return batch
        fields, owner = cast(dict[str, Tensor], joined), self.episodes.clamp(min=0)
        rows = {
            name: self.view.split(x) if x.size(1) == self.turn_index.size(1) else x[owner]
            for name in ADDED
            if (x := fields.get(name)) is not None
        }
        rows["episode"] = self.episodes
        rows["episode_tokens"] = joined["loss_mask"].sum(dim=1)[owner]
        if "episode_weights" in joined:
            rows["episode_weights"] = joined["episode_weights"][owner]
        return cast(Batch, {**batch, **rows})


@dataclass(frozen=True)
class Targets:
    """Per-token targets of one rollout batch, all [B, T].

    Attributes:
        rewards: reward units, as they enter GAE.
        raw_advantages: advantages before whitening.
        advantages: advantages as they enter the loss; 0 off `loss_mask`.
        returns: regression targets; meaningful on `value_mask`.
        spread: standard deviation of the raw advantages over the tokens of all processes that train, in units
            of the rewards before whitening.
        figures: metrics of the comparison within groups.
    """

    rewards: Tensor
    raw_advantages: Tensor
    advantages: Tensor
    values: Tensor
    returns: Tensor
    value_mask: Tensor
    spread: float
    figures: dict[str, float] = field(default_factory=dict)


def collate(
    contexts: Sequence[Context],
    *,
    pad_token_id: int,
    multiple_of: int | None,
    device: torch.device,
    has_logprobs: bool,
    hidden: Sequence[bool],
) -> Batch:
    """Pad contexts into a batch of tensors; the masks of `hidden` contexts are 0."""

    def padded(rows: list[list[Any]], value: float, side: str = "right") -> Tensor:
        tensors = [torch.tensor(row) for row in rows]
        return pad(
            tensors, padding_value=value, padding_side=side, pad_to_multiple_of=multiple_of
        ).to(device)

    prompts, completions = [c.prompt_ids for c in contexts], [c.ids for c in contexts]
    shown = torch.tensor([not flag for flag in hidden], device=device).unsqueeze(1).int()
    batch: Batch = {
        "prompt_ids": padded(prompts, pad_token_id, "left"),
        "prompt_mask": padded([[1] * len(ids) for ids in prompts], 0, "left"),
        "completion_ids": padded(completions, pad_token_id),
        "completion_mask": padded([[1] * len(ids) for ids in completions], 0) * shown,
        "tool_mask": padded([[int(flag) for flag in c.action_mask] for c in contexts], 1) * shown,
    }
    if has_logprobs:
        # vLLM gives None for a missing log-probability.
        rows = [[float("nan") if x is None else x for x in c.logprobs] for c in contexts]
        batch["sampling_per_token_logps"] = padded(rows, 0.0)
    return batch


def build_turn_batch(
    episodes: Sequence[Episode],
    turn_rewards: Sequence[Sequence[float]] | None,
    completion_mask: Tensor,
    dtype: torch.dtype,
) -> TurnBatch:
    """Collect the turns of episodes into tensors; `turn_rewards`, in reward units, are cast to `dtype`.

    `completion_mask`: [N, T], 0 past a context's end, and 0 throughout a hidden episode.
    """
    device, (rows, length) = completion_mask.device, completion_mask.shape
    contexts = [(n, context) for n, episode in enumerate(episodes) for context in episode.contexts]
    spans = [context.turn_spans for _, context in contexts]
    spans += [[]] * (rows - len(spans))
    index = turn_index_from_spans(spans, length, device=device)
    index = index.masked_fill(~completion_mask.bool(), -1)
    owners = [number for number, _ in contexts]
    view = None
    if len(contexts) > len(episodes):
        hidden = (~completion_mask.bool()).all(dim=1).tolist()
        shown = [[] if hide else own for own, hide in zip(spans, hidden, strict=True)]
        numbers = [
            context.turns if own else [] for (_, context), own in zip(contexts, shown, strict=False)
        ]
        view = JoinedView(
            shown, numbers, owners, num_episodes=len(episodes), length=length, device=device
        )
    joined = index if view is None else view.turn_index
    rewards = None if turn_rewards is None else _padded(turn_rewards, joined, dtype)
    terminated = torch.tensor([episode.terminated for episode in episodes], device=device)
    of_rows = torch.tensor([*owners, *[-1] * (rows - len(owners))], device=device)
    return TurnBatch(joined, rewards, terminated, index, of_rows, view)


def _padded(
    turn_rewards: Sequence[Sequence[float]], turn_index: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return turn rewards as a padded tensor, [B, K], with 0 for hidden episodes."""
    counts = (turn_index.amax(dim=1) + 1).tolist()
    table = torch.zeros(len(turn_rewards), max(1, *counts), dtype=dtype)
    for episode, (rewards, turns) in enumerate(zip(turn_rewards, counts, strict=True)):
        if turns:
            table[episode, :turns] = torch.tensor(rewards, dtype=dtype)
    return table.to(turn_index.device)


def full_sequence(batch: Batch) -> tuple[Tensor, Tensor, int]:
    """Join prompt and completion; return token ids and mask, [B, P + T] each, and T."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return ids, mask, batch["completion_ids"].size(1)


def row_tokens(batch: Batch) -> Tensor:
    """Count the tokens of prompt and completion of each row, [B]."""
    return batch["prompt_mask"].sum(dim=1) + batch["completion_mask"].sum(dim=1)


def num_episodes(batches: Sequence[Batch]) -> int:
    """Count the distinct episodes in a list of micro-batches."""
    if "episode" not in batches[0]:
        return sum(len(batch["loss_mask"]) for batch in batches)
    numbers = torch.cat([batch["episode"] for batch in batches])
    return len(numbers[numbers >= 0].unique())


def deal(batches: Sequence[Batch], count: int) -> list[Batch]:
    """Shuffle the episodes of a rollout, in one batch or several, into `count` equal micro-batches."""
    joined = join(batches)
    device = joined["loss_mask"].device
    order = torch.randperm(num_episodes([joined])).view(count, -1)
    owners = joined.get("episode", torch.arange(len(joined["loss_mask"]))).cpu()
    rows = [
        torch.cat([(owners == number).nonzero()[:, 0] for number in numbers]) for numbers in order
    ]
    # Padding rows train nothing, so put all of them into the first micro-batch.
    rows[0] = torch.cat([rows[0], (owners < 0).nonzero()[:, 0]])
    return [take_rows(joined, own.to(device)) for own in rows]


def group_by_length(batches: list[Batch]) -> list[Batch]:
    """Sort a mini-batch's rows by length into its micro-batches, shortest first, to save padding."""
    return _regrouped(batches, lambda joined: row_tokens(joined).argsort(stable=True))


def group_by_beginning(batches: list[Batch]) -> list[Batch]:
    """Sort a mini-batch's rows by tokens into its micro-batches, so that rows with equal beginnings meet."""

    def order(joined: Batch) -> Tensor:
        ids, mask, _ = full_sequence(joined)
        rows = [row[kept].tolist() for row, kept in zip(ids, mask.bool(), strict=True)]
        return torch.tensor(sorted(range(len(rows)), key=rows.__getitem__), device=ids.device)

    return _regrouped(batches, order)


def _regrouped(batches: list[Batch], order: Callable[[Batch], Tensor]) -> list[Batch]:
    """Split the rows of batches into equally many batches by `order`; return a single batch unchanged."""
    if len(batches) == 1:
        return batches
    joined = join(batches)
    return [take_rows(joined, rows) for rows in order(joined).tensor_split(len(batches))]


def take_rows(batch: Batch, rows: Tensor) -> Batch:
    """Select rows of a batch by index; scalar fields, which older checkpoints have, stay unchanged."""
    fields = cast(dict[str, Tensor], batch)
    return cast(Batch, {key: x[rows] if x.ndim else x for key, x in fields.items()})


def join(batches: Sequence[Batch]) -> Batch:
    """Concatenate batches along their rows."""
    if len(batches) == 1:
        return batches[0]
    fields = cast(Sequence[dict[str, Tensor]], batches)
    joined = {
        key: torch.cat([batch[key] for batch in fields]) if first.ndim else first
        for key, first in fields[0].items()
    }
    return cast(Batch, joined)


def without_padding(batch: Batch) -> Batch:
    """Drop the last columns of a batch if they are padding in every row."""
    width = batch["completion_mask"].size(1)
    length = max(1, int(batch["completion_mask"].sum(dim=1).max()))
    kept = ("prompt_ids", "prompt_mask")
    short = {
        key: x[:, :length] if x.ndim == 2 and x.size(1) == width and key not in kept else x
        for key, x in cast(dict[str, Tensor], batch).items()
    }
    return cast(Batch, short)
