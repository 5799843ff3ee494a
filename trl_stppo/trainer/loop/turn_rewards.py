"""Process rewards: functions that score each turn in its context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainerState

from ...envs.base import Row
from ...rollout.chat import Message
from ...rollout.images import with_pictures
from ...rollout.reward_funcs import RewardFunc, called, is_function, name_of, numbered
from .rollout import Played, Sums

Prompt = str | list[Message]


@dataclass
class Turn:
    """One turn and everything before it.

    `episode` is the index of its episode in the rollout, `number` its index in the episode. The completion is
    text or a list of one message.
    """

    episode: int
    number: int
    prompt: Prompt
    completion: Prompt
    ids: list[int]
    columns: Row


def turns_in_context(tokenizer: PreTrainedTokenizerBase, rollout: Played) -> list[Turn]:
    """Return the turns of all episodes that train, each with its context."""
    turns = []
    for i, (episode, row) in enumerate(zip(rollout.episodes, rollout.rows_of_episodes(), strict=True)):
        if not episode.trains:
            continue
        prompt, messages = with_pictures(episode.prompt), with_pictures(episode.messages)
        spoken = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        # The result of a rollout_func is one message, independent of its number of turns.
        knows_turns = episode.conversational and rollout.seed is not None
        places = [
            (c, n, *span) for c in episode.contexts for n, span in zip(c.turns, c.turn_spans, strict=True)
        ]
        context: Prompt
        completion: Prompt
        for own, number, start, end in places:
            ids = own.ids
            if episode.exchanges:
                context, turn = episode.exchanges[number]
                context, completion = with_pictures(context), [turn]
            elif knows_turns:
                at = spoken[number]
                context, completion = [*prompt, *messages[:at]], [messages[at]]
            else:
                before = tokenizer.decode(ids[:start], skip_special_tokens=True)
                text = tokenizer.decode(ids[start:end], skip_special_tokens=True)
                if isinstance(prompt, str):
                    context, completion = prompt + before, text
                else:
                    said = [{"role": "assistant", "content": before}] if before else []
                    context = [*prompt, *said]
                    completion = [{"role": "assistant", "content": text}]
            turns.append(Turn(i, number, context, completion, ids[start:end], row))
    return turns


class TurnRewardFuncs:
    """Scores turns with the functions in `turn_reward_funcs`, and adds up their rewards."""

    def __init__(
        self, funcs: Any, run_async: Callable[..., object], tokenizer: PreTrainedTokenizerBase
    ) -> None:
        funcs = [] if funcs is None else funcs
        self.funcs = list(funcs) if isinstance(funcs, list | tuple) else [funcs]
        self._run_async, self._tokenizer = run_async, tokenizer
        for i, func in enumerate(self.funcs):
            if not is_function(func):
                raise ValueError(
                    f"`turn_reward_funcs[{i}]` is a {type(func).__name__}; allowed are functions, which may "
                    f"call a model."
                )

    def rewards(
        self, rollout: Played, environments: list[Any] | None, trainer_state: TrainerState
    ) -> tuple[list[list[float]], Sums]:
        """Return the rewards by episode and turn, the episodes' own included, and metrics.

        Metrics leave out episodes that only pad the batch. `environments`: None if functions do not get them.
        """
        turns = turns_in_context(self._tokenizer, rollout)
        # Copy the lists, because the originals belong to the episodes.
        table, sums = [list(episode.turn_rewards) for episode in rollout.episodes], Sums()

        # Upstream's log_metric would log these values only with the next rollout.
        def log_metric(name: str, value: float) -> None:
            total, count = sums.get(name, (0.0, 0))
            sums[name] = total + value, count + 1

        names = numbered([*map(name_of, self.funcs)])
        more: dict[str, Any] = {"trainer_state": trainer_state, "log_metric": log_metric}
        if environments is not None:
            more["environments"] = [environments[turn.episode] for turn in turns]
        for name, func in zip(names, self.funcs, strict=True):
            rewards = self._called(func, turns, more) if turns else []
            for turn, reward in zip(turns, rewards, strict=True):
                if reward is not None:
                    table[turn.episode][turn.number] += reward
                if reward is not None and turn.episode not in rollout.repeated:
                    log_metric(f"rewards/{name}/turn_mean", reward)
        return table, sums

    def _called(self, func: RewardFunc, turns: list[Turn], more: dict[str, Any]) -> list[float | None]:
        return called(
            func,
            [turn.columns for turn in turns],
            self._run_async,
            prompts=[turn.prompt for turn in turns],
            completions=[turn.completion for turn in turns],
            completion_ids=[turn.ids for turn in turns],
            turn=[turn.number for turn in turns],
            # Extra columns are dropped, because the table of completions has one row per episode.
            log_extra=lambda column, values: None,
            **more,
        )
