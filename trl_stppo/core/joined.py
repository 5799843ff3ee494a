"""Joins the contexts of each episode into one row of tokens, for the estimators of advantages.

A forward pass takes contexts: rows of tokens, [N, T]. An estimator of advantages takes episodes: the
sampled tokens of all contexts in the order of their turns, [B, J]. The turn after a rewritten context is
then the next turn, as it is within a context.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class JoinedView:
    """Moves per-token numbers between a tensor of contexts [N, T] and a tensor of episodes [B, J].

    J is the largest number of sampled tokens of an episode, at least 1. [B, J] holds no other tokens.

    Args:
        spans: per context, the half-open token offsets of its turns.
        turns: per context, the numbers of these turns in the episode.
        episodes: per context, the index of its episode.
        num_episodes, length, device: B, T, and the device of the tensors.

    Attributes:
        turn_index: [B, J] int64, k at the tokens of turn k of the episode, -1 at padding.
        last: [B] int64, index of the context with the episode's last turn, or of one without turns after it.

    Source: GAE across rewritten contexts, as in arXiv:2604.18401 (StepPO).
    """

    def __init__(
        self,
        spans: Sequence[Sequence[tuple[int, int]]],
        turns: Sequence[Sequence[int]],
        episodes: Sequence[int],
        *,
        num_episodes: int,
        length: int,
        device: torch.device | str | None = None,
    ) -> None:
        self._shape = len(spans), length
        pieces: list[list[tuple[int, int, int]]] = [[] for _ in range(num_episodes)]
        for row, episode in enumerate(episodes):
            for turn, (start, end) in zip(turns[row], spans[row], strict=True):
                pieces[episode].append((turn, row * length + start, row * length + end))
        width = max([1, *(sum(end - start for _, start, end in own) for own in pieces)])
        source = torch.full((num_episodes, width), -1)
        index = torch.full((num_episodes, width), -1)
        last = torch.zeros(num_episodes, dtype=torch.int64)
        for episode, own in enumerate(pieces):
            place = 0
            for turn, start, end in sorted(own):
                until = place + end - start
                source[episode, place:until] = torch.arange(start, end)
                index[episode, place:until] = turn
                last[episode], place = start // length, until
        for row, episode in enumerate(episodes):
            if not turns[row]:
                last[episode] = max(row, int(last[episode]))
        self._source, self.turn_index = source.to(device), index.to(device)
        self.last = last.to(device)

    def join(self, x: Tensor) -> Tensor:
        """Move per-token values from contexts [N, T] to episodes [B, J]. Padding gets 0 (False)."""
        return x.flatten()[self._source.clamp(min=0)].masked_fill(self._source < 0, 0)

    def split(self, y: Tensor) -> Tensor:
        """Move per-token values from episodes [B, J] to contexts [N, T]. Unsampled tokens get 0 (False)."""
        # The extra last place collects the padding and is dropped.
        size = self._shape[0] * self._shape[1]
        places = torch.where(self._source < 0, size, self._source)
        x = y.new_zeros(size + 1).scatter(0, places.flatten(), y.flatten())
        return x[:-1].view(self._shape)
