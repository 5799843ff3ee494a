"""Critic side of the study of rivals: advantages against Monte Carlo ones, on fresh episodes of the policy.

In the corridor a state is the room, and whether all doors so far were right; its worth is the product of
the chances of a right door in the rooms that are left. Each of a few held-out rows is played many times:
the other episodes of a row say how often its doors are right, and so what a turn of this one was worth.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from _rivals_stages import LEVELS, Records, Trial, base_of, levels, trial
from _rivals_trainer import CREDIT, RivalTrainer
from _stability_grid import SUCCESS, TUNE_SEEDS
from _stability_tasks import ROOMS, CorridorEnv
from torch import Tensor

from trl_stppo.core import reduce_turns, token_gae, token_rewards, turn_gae, turn_starts
from trl_stppo.trainer.batch import build_turn_batch
from trl_stppo.trainer.evaluation.settings import evaluation_settings, undisturbed

ARMS = (
    *("turn", "share", "winners+share-logits", "episodes+vtrace+share"),
    *("critic-lambda+share", "turn-gae+share", "token-gae+share"),
)
UPDATES = (5, 10, 15, 20)  # after which it is measured
ROWS, REPLAYS = 16, 48


def credit(records: Records, task: str) -> list[Trial]:
    """Seeds and levels of the first stage, where a state is known."""
    if task != "corridor":
        return []
    at = levels(records, task)
    return [
        trial("credit", task, arm, name, at[name], seed, base_of(records, task, arm))
        for seed, name, arm in itertools.product(TUNE_SEEDS, LEVELS, ARMS)
    ]


class CreditTrainer(RivalTrainer):
    """A rival whose critic is asked now and then."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if self.model.training:
            self._ask_critic()
        return super()._generate_and_score_completions(inputs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As ever; the log's line of an update also says how good its critic is."""
        self._found: dict[int, dict[str, float]] = {}
        self._rollouts = -1
        try:
            return super().train(*args, **kwargs)
        finally:
            self._ask_critic()
            lines = [line for line in self.state.log_history if SUCCESS in line]
            for update, line in enumerate(lines, start=1):
                line.update(self._found.get(update, {}))

    def _ask_critic(self) -> None:
        self._rollouts += 1
        if self._rollouts not in UPDATES:
            return
        with undisturbed(self), evaluation_settings(self), torch.no_grad():
            self.model.eval()
            self._found[self._rollouts] = self._correlations()

    def _correlations(self) -> dict[str, float]:
        rows = [row for row in self.eval_dataset.select(range(ROWS)) for _ in range(REPLAYS)]
        rollout = self._player.play(rows, (self.args.seed, 2, self._rollouts))
        batch = self._player.pad(rollout)
        turns = build_turn_batch(
            rollout.episodes, rollout.turn_rewards, batch["completion_mask"], torch.float32
        )
        batch["turn_index"] = index = turns.turn_index
        values, _ = self._loop.rollout_values(batch)
        rewards = token_rewards(
            index, scores=values.new_zeros(len(values)), turn_rewards=turns.turn_rewards
        )
        of_turns = partial(reduce_turns, turn_index=index, num_turns=ROOMS)
        doors = torch.tensor([right_doors(e.columns, actions_of(e)) for e in rollout.episodes])
        worth, advantages = monte_carlo(doors.view(ROWS, REPLAYS, ROOMS))
        at_starts = of_turns(values.masked_fill(~turn_starts(index), 0.0), op="sum")
        returns = rewards.sum(1, keepdim=True)
        estimates = (
            of_turns(token_gae(rewards, values, index >= 0, 1.0, self.args.lam)[0], op="mean"),
            of_turns(turn_gae(rewards, values, index, 1.0, self.args.lam)[0], op="mean"),
            returns - at_starts,
            (returns - returns.mean()).expand(-1, ROOMS),
        )
        found = [correlation(e, advantages.flatten(0, 1)) for e in estimates]
        found.append(correlation(at_starts, worth.flatten(0, 1)))
        return dict(zip(CREDIT, found, strict=True))


def actions_of(episode: Any) -> list[str]:
    """What the policy has said."""
    return [m["content"] for m in episode.messages if m["role"] == "assistant"]


def right_doors(row: dict[str, Any], actions: Sequence[str]) -> list[bool]:
    """Per room whether its door was right; actions are those of the whole episode."""
    env, right = CorridorEnv(), []
    env.reset(**row)
    for action in actions:
        right.append(env.is_right(action))
        env.step(action)
    return right


def monte_carlo(doors: Tensor) -> tuple[Tensor, Tensor]:
    """Worth of the state before each turn and advantage of each turn, from a row's other episodes.

    Args:
        doors: [R, N, K] bool, whether episode n of row r took the right door in room k. R rows, N episodes
            of each, K rooms.

    Returns:
        Two of [R, N, K], of reward 1 for K right doors. A room that no other episode of the row has reached
        without a mistake has the chance of all rows.
    """
    right = doors.double()
    so_far = right.cumprod(2)  # all right up to and with this room
    reached = torch.nn.functional.pad(so_far[..., :-1], (1, 0), value=1.0)
    tried = reached.sum(1, keepdim=True) - reached
    passed = so_far.sum(1, keepdim=True) - so_far
    everywhere = so_far.sum((0, 1)) / reached.sum((0, 1)).clamp(min=1.0)
    chances = torch.where(tried > 0, passed / tried.clamp(min=1.0), everywhere)
    left = chances.flip(2).cumprod(2).flip(2)  # of all rooms from this one on
    after = torch.nn.functional.pad(left[..., 1:], (0, 1), value=1.0)
    worth = reached * left
    return worth, so_far * after - worth


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's; 0 where one of them is constant."""
    both = torch.stack([a.flatten(), b.flatten()]).double()
    return float(torch.corrcoef(both)[0, 1].nan_to_num())


def credit_table(records: Records) -> list[dict[str, Any]]:
    """Mean over seeds and moments, per level and rival."""
    lines = []
    for name, arm in itertools.product(LEVELS, ARMS):
        runs = [
            r for r in records.of("credit", "corridor") if (r["level"], r["key"][2]) == (name, arm)
        ]
        if runs:
            means = {
                n: statistics.fmean([x for r in runs for x in r["curves"][n] if x is not None])
                for n in CREDIT
            }
            lines.append({"level": name, "arm": arm, "runs": len(runs), **means})
    return lines
