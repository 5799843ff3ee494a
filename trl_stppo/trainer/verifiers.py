"""Verifiers that select one of several turns: a function, a judge, or the run's trained critic."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..generation.sampling import SamplingSettings
from ..hub.fetching import critic_folder
from ..hub.loading import load_tokenizer
from ..hub.settings import CRITIC_FOLDER
from ..models.critic import HEAD_FILE, Critic, SeparateCritic
from ..models.critic_models import critic_from_checkpoint
from ..models.label_scorer import LabelTokenScorer
from ..rollout.turns import Selection, Turn, scores_of
from .setup.continuing import shared_critic

Verifier = str | Critic | Callable[..., Any]


def selection(
    candidates: int, verifier: Verifier | None, sampling: SamplingSettings
) -> Selection | None:
    """Return a selector of the best of `candidates` turns, or None for a single candidate.

    `verifier`: a function in the form of `turn_reward_funcs`, a critic, or the name of a causal model
    (`LabelTokenScorer`).
    """
    if candidates < 1 or (candidates == 1) != (verifier is None):
        raise ValueError(
            f"`candidates={candidates}` with `verifier={verifier!r}`; a verifier is for candidates >= 2."
        )
    if verifier is None:
        return None
    if not sampling.do_sample:
        raise ValueError(
            f"`candidates={candidates}` with greedy sampling: all would be the same turn."
        )
    if isinstance(verifier, str):
        verifier = LabelTokenScorer.from_pretrained(verifier, tokenizer=load_tokenizer(verifier))
    if isinstance(verifier, Critic):
        return Selection(candidates, CriticScores(verifier))
    return Selection(candidates, _function(verifier))


def _function(func: Callable[..., Any]) -> Callable[[list[Turn]], list[float]]:
    if not callable(func) or inspect.iscoroutinefunction(func):
        raise ValueError(
            f"`verifier` is {func!r}; allowed are 'critic', the name of a causal language model, and "
            f"functions (not asynchronous ones) that take `prompts`, `completions` and the rows' columns."
        )

    def scores(turns: list[Turn]) -> list[float]:
        scored = scores_of(func, turns, lambda value: value)
        return [float("-inf") if score is None else score for score in scored]

    return scores


class CriticScores:
    """Scores a turn by the critic's value after it.

    This is the value before the turn's last token, which ends it: the last state before the
    environment's answer on which the critic is trained.
    """

    def __init__(self, critic: Critic, batch_size: int = 16) -> None:
        self._critic, self._batch_size = critic, batch_size

    def __call__(self, turns: list[Turn]) -> list[float]:
        """Return one value per turn, in reward units."""
        rows = [turn.before + turn.ids[: max(1, len(turn.ids) - 1)] for turn in turns]
        order, values = sorted(range(len(rows)), key=lambda i: len(rows[i])), [0.0] * len(rows)
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            for row, value in zip(batch, self._values([rows[i] for i in batch]), strict=True):
                values[row] = value
        return values

    @torch.no_grad()
    def _values(self, rows: list[list[int]]) -> list[float]:
        longest, device = max(map(len, rows)), self._critic.parameters()[0].device
        # Padded on the right, which a causal model does not attend to; any token works.
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in rows], device=device)
        ends = torch.tensor([len(row) - 1 for row in rows], device=device)
        with self._critic.active():
            hidden = self._critic.hidden_states(ids, mask)
            last = hidden[torch.arange(len(rows), device=device), ends]
            return self._critic.score(last.unsqueeze(1)).squeeze(1).tolist()


def published_critic(
    name: str, policy: Any, revision: str | None = None, token: str | bool | None = None
) -> Critic:
    """Load the critic that was saved with a policy, to compute values."""
    folder = critic_folder(name, CRITIC_FOLDER, revision, token)
    if folder is None:
        raise FileNotFoundError(
            f"`verifier='critic'`: there is no critic beside the policy in {name!r}. Trainers with a critic "
            f"save one into the folder `{CRITIC_FOLDER}`; name another verifier for this agent."
        )
    if (folder / HEAD_FILE).is_file():
        return shared_critic(policy, folder)
    model = critic_from_checkpoint(str(folder), dtype=policy.dtype)
    return SeparateCritic(model.to(policy.device).eval())
