"""Rollouts as tensors: from episodes to all that an update trains on.

A batch's rows are contexts; an episode that never rewrote its context is one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict, cast

import torch
from torch import Tensor

from ..core import JoinedView, turn_index_from_spans
from ..rollout.episode import Context, Episode
from ._trl import pad

_ZERO = torch.zeros(())


class Tokens(TypedDict):
    """Tokens of contexts: prompts [N, P] and completions [N, T].

    Attributes:
        prompt_ids: [N, P] int64, padded on the left.
        completion_ids: [N, T] int64, padded on the right: turns and what lies between them.
        completion_mask: [N, T] int, 0 past a context's end, and throughout contexts that
            `mask_truncated_completions` hides.
        tool_mask: [N, T] int, 0 at observations, and throughout hidden contexts. Packed
            passes compute its tokens, and subclasses know TRL's name; our loss uses `loss_mask`.
        sampling_per_token_logps: [N, T] nats, the sampler's own log-probabilities, NaN if it gave none;
            present if the sampler gives them.
        images: [N, M] int64, keys of the images of each row in the order of their tokens, -1 for none;
            present if the policy has a processor.
    """

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    tool_mask: Tensor
    sampling_per_token_logps: NotRequired[Tensor]
    images: NotRequired[Tensor]


class UpdateData(Tokens):
    """All that an update trains on, complete when it is made.

    The configuration alone decides which of the optional columns are present.

    Attributes:
        turn_index: [N, T] int64, k inside the context's turn k, -1 elsewhere.
        loss_mask: [N, T] bool, tokens that train.
        advantages: [N, T], as they enter the loss; 0 off `loss_mask`.
        values, returns: [N, T] reward units, the critic's values before the update, and its targets; 0
            without a critic.
        value_mask: [N, T] bool, where the critic has targets, never at observations: `loss_mask`, or
            with turn advantages its turn starts.
        row: [N] int64, number of the row in this process's rollout batch.
        episode, episode_tokens: [N] each, index of the row's episode (-1 at padding rows), and number of
            the episode's tokens in the loss.
        old_per_token_logps: [N, T] nats, by training's forward pass, under the weights that played;
            present unless one step trains on the whole rollout and nothing else needs them.
        start_per_token_logps: [N, T] nats, under the weights at the start of the update; present if a
            trust region measures the KL and rollouts are stale.
        ref_per_token_logps: [N, T] nats, of the reference policy; present if a KL to it is measured.
        importance_sampling_ratio: [N, T] or [N, 1], constant weights that correct for the difference
            between sampler and training; present with vLLM, if its correction is on.
        episode_weights: [N], the weights by `stabilizers`; present if one of them weighs episodes.
    """

    turn_index: Tensor
    loss_mask: Tensor
    advantages: Tensor
    values: Tensor
    returns: Tensor
    value_mask: Tensor
    row: Tensor
    episode: Tensor
    episode_tokens: Tensor
    old_per_token_logps: NotRequired[Tensor]
    start_per_token_logps: NotRequired[Tensor]
    ref_per_token_logps: NotRequired[Tensor]
    importance_sampling_ratio: NotRequired[Tensor]
    episode_weights: NotRequired[Tensor]


@dataclass(frozen=True)
class TurnBatch:
    """Turns, turn rewards and endings of the episodes in this process's rollout batch.

    Attributes:
        turn_index: [B, T] int64, k at the tokens of turn k, -1 elsewhere.
        turn_rewards: [B, K] float, 0 where an episode has fewer turns, or None.
        terminated: [B] bool, True if no state can follow the episode.
        row_index: [N, T] int64, `turn_index` of the batch's rows, numbered from 0 in each.
        episodes: [N] int64, index of each row's episode, -1 at padding rows.
        view: the joined rows, unless each row is an episode.
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

    def last(self, x: Tensor) -> Tensor:
        """Select each episode's last context from values of the rows, [N]."""
        return x if self.view is None else x[self.view.last]

    def join(self, x: Tensor) -> Tensor:
        """Move per-token values from rows, [N, T], to episodes, [B, T]."""
        return x if self.view is None else self.view.join(x)

    def split(self, x: Tensor) -> Tensor:
        """Move values of episodes, per token [B, T] or per episode [B] or [B, 1], to the rows.

        Per token, tokens that were not sampled get 0, or False.
        """
        if self.view is None:
            return x
        if x.ndim == 2 and x.size(1) == self.turn_index.size(1):
            return self.view.split(x)
        return x[self.episodes.clamp(min=0)]


@dataclass(frozen=True)
class Passes:
    """Results of the passes over a rollout before its update, with a row per context or per episode.

    Attributes:
        old: [N, T] nats, log-probabilities under the weights that played, or None.
        start: [N, T] nats, log-probabilities under the weights at the start of the update, or None.
        ref: [N, T] nats, log-probabilities under the reference policy, or None.
        sampled: [N, T] nats, log-probabilities by the sampler, or None.
        values: [N, T] reward units, the critic's values before each token; None without a critic.
        final_values: [N], the critic's values after the last token; None without a critic.
    """

    old: Tensor | None
    start: Tensor | None
    ref: Tensor | None
    sampled: Tensor | None
    values: Tensor | None
    final_values: Tensor | None

    def of_episodes(self, turns: TurnBatch) -> Passes:
        """Join the rows of each episode."""
        own = (self.old, self.start, self.ref, self.sampled, self.values)
        old, start, ref, sampled, values = (None if x is None else turns.join(x) for x in own)
        final = None if self.final_values is None else turns.last(self.final_values)
        return Passes(old, start, ref, sampled, values, final)


@dataclass(frozen=True)
class Targets:
    """Per-token targets of one rollout batch, [B, T] with a row per episode.

    Attributes:
        rewards: reward units, as they enter GAE.
        raw_advantages: advantages before whitening.
        advantages: advantages as they enter the loss; 0 off the tokens that train.
        values: the critic's values before the update; 0 without a critic.
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


@dataclass(frozen=True)
class Estimates:
    """All that is computed of a rollout's episodes before their update.

    Attributes:
        turns: turns of the episodes.
        passes: results of the passes, with a row per episode.
        mask: [B, T] bool, tokens that train.
        kl: [B, T] nats, the KL to the reference in the reward, or None.
        sampler_weights: [B, T] or [B, 1], weights that correct for the sampler, or None.
        targets: advantages, and the critic's targets.
        episode_weights: [B], by the stabilizers, or None.
    """

    turns: TurnBatch
    passes: Passes
    mask: Tensor
    kl: Tensor | None
    sampler_weights: Tensor | None
    targets: Targets
    episode_weights: Tensor | None


@dataclass(frozen=True)
class MiniBatch:
    """The micro-batches of one optimizer step, with counts over all processes of what trains.

    Attributes:
        parts: this process's micro-batches.
        episodes, turns, policy_tokens, value_tokens: counts, each [] in float32.
        clip_range: how far below and above 1 a ratio may lie.
    """

    parts: list[UpdateData]
    episodes: Tensor
    turns: Tensor
    policy_tokens: Tensor
    value_tokens: Tensor
    clip_range: tuple[float, float]

    @property
    def is_empty(self) -> bool:
        """Return whether no process has a token that trains."""
        return not (self.policy_tokens or self.value_tokens)


NO_MINI_BATCH = MiniBatch([], _ZERO, _ZERO, _ZERO, _ZERO, (0.0, 0.0))


def collate(
    contexts: Sequence[Context],
    *,
    pad_token_id: int,
    multiple_of: int | None,
    device: torch.device,
    has_logprobs: bool,
    hidden: Sequence[bool],
    sees: bool = False,
) -> Tokens:
    """Pad contexts into a batch of tensors; the masks of `hidden` contexts are 0.

    `sees`: whether the policy reads images.
    """

    def padded(rows: list[list[Any]], value: float, side: str = "right") -> Tensor:
        tensors = [torch.tensor(row) for row in rows]
        return pad(tensors, padding_value=value, padding_side=side, pad_to_multiple_of=multiple_of).to(device)

    prompts, completions = [c.prompt_ids for c in contexts], [c.ids for c in contexts]
    shown = torch.tensor([not flag for flag in hidden], device=device).unsqueeze(1).int()
    more: dict[str, Tensor] = {}
    if has_logprobs:
        # vLLM gives None for a missing log-probability.
        rows = [[float("nan") if x is None else x for x in c.logprobs] for c in contexts]
        more["sampling_per_token_logps"] = padded(rows, 0.0)
    if sees:
        # An empty row would give a column of no width, which tensors of other batches do not join.
        keys = [torch.tensor([image.key for image in c.images] or [-1]) for c in contexts]
        more["images"] = pad(keys, padding_value=-1, padding_side="right").to(device)
    tokens = {
        "prompt_ids": padded(prompts, pad_token_id, "left"),
        "prompt_mask": padded([[1] * len(ids) for ids in prompts], 0, "left"),
        "completion_ids": padded(completions, pad_token_id),
        "completion_mask": padded([[1] * len(ids) for ids in completions], 0) * shown,
        "tool_mask": padded([[int(flag) for flag in c.action_mask] for c in contexts], 1) * shown,
    }
    return cast(Tokens, tokens | more)


def full_sequence(batch: Tokens) -> tuple[Tensor, Tensor, int]:
    """Join prompt and completion; return token ids and mask, [B, P + T] each, and T."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return ids, mask, batch["completion_ids"].size(1)


def row_tokens(batch: Tokens) -> Tensor:
    """Count the tokens of prompt and completion of each row, [B]."""
    return batch["prompt_mask"].sum(dim=1) + batch["completion_mask"].sum(dim=1)


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
    if rows != len(episodes):
        hidden = (~completion_mask.bool()).all(dim=1).tolist()
        shown = [[] if hide else own for own, hide in zip(spans, hidden, strict=True)]
        numbers = [context.turns if own else [] for (_, context), own in zip(contexts, shown, strict=False)]
        view = JoinedView(shown, numbers, owners, num_episodes=len(episodes), length=length, device=device)
    joined = index if view is None else view.turn_index
    rewards = None if turn_rewards is None else _padded(turn_rewards, joined, dtype)
    terminated = torch.tensor([episode.terminated for episode in episodes], device=device)
    of_rows = torch.tensor([*owners, *[-1] * (rows - len(owners))], device=device)
    return TurnBatch(joined, rewards, terminated, index, of_rows, view)


def _padded(turn_rewards: Sequence[Sequence[float]], turn_index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return turn rewards as a padded tensor, [B, K], with 0 for hidden episodes."""
    counts = (turn_index.amax(dim=1) + 1).tolist()
    table = torch.zeros(len(turn_rewards), max(1, *counts), dtype=dtype)
    for episode, (rewards, turns) in enumerate(zip(turn_rewards, counts, strict=True)):
        if turns:
            table[episode, :turns] = torch.tensor(rewards, dtype=dtype)
    return table.to(turn_index.device)


def update_data(tokens: Tokens, passes: Passes, estimates: Estimates) -> UpdateData:
    """Complete the data of an update; `passes` has a row per context, `estimates` a row per episode."""
    turns, targets, mask = estimates.turns, estimates.targets, estimates.mask
    of_episodes = {
        "loss_mask": mask,
        "advantages": targets.advantages,
        # The zeros of a run without a critic; else `columns` has the values.
        "values": targets.values if passes.values is None else None,
        "returns": targets.returns,
        "value_mask": targets.value_mask,
        "episode_tokens": mask.sum(dim=1),
        "importance_sampling_ratio": estimates.sampler_weights,
        "episode_weights": estimates.episode_weights,
    }
    columns = {
        "turn_index": turns.row_index,
        "row": torch.arange(len(turns.row_index), device=mask.device),
        "episode": turns.episodes,
        "old_per_token_logps": passes.old,
        "start_per_token_logps": passes.start,
        "ref_per_token_logps": passes.ref,
        "values": passes.values,
    }
    columns |= {name: turns.split(x) for name, x in of_episodes.items() if x is not None}
    return cast(UpdateData, {**tokens, **{n: x for n, x in columns.items() if x is not None}})
