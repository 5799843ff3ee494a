"""Process rewards: functions and reward models that score each turn in its context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TrainerState,
)

from ...envs.base import Row
from ...rollout.chat import Message
from ...rollout.images import with_pictures
from ...rollout.record import check_reward
from ...rollout.reward_funcs import RewardFunc, called, name_of, numbered
from .._trl import apply_chat_template, get_config_model_id
from ..planning.rewards import check_scores
from ..ppo_config import PPOConfig
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
    """Scores turns with the functions and models in `turn_reward_funcs`, and adds up their rewards."""

    def __init__(
        self,
        funcs: Any,
        processing_classes: Any,
        run_async: Callable[..., object],
        tokenizer: PreTrainedTokenizerBase,
        accelerator: Accelerator,
        args: PPOConfig,
        *,
        template_kwargs: dict[str, Any],
    ) -> None:
        funcs = [] if funcs is None else funcs
        self.funcs = list(funcs) if isinstance(funcs, list | tuple) else [funcs]
        number, classes = len(self.funcs), processing_classes
        if not isinstance(classes, list):
            classes = [classes] * number
        if len(classes) != number:
            raise ValueError(
                f"`turn_reward_processing_classes` has {len(classes)} entries for {number} turn reward "
                f"functions; give one each."
            )
        self._tokenizer, self._accelerator = tokenizer, accelerator
        self._template_kwargs, self._batch_size = template_kwargs, args.forward_batch_size
        self._run_async = run_async
        self._tokenizers: dict[int, PreTrainedTokenizerBase] = {}
        for i, func in enumerate(self.funcs):
            check_scores(func, f"turn_reward_funcs[{i}]", trust=args.trust_remote_code)
            if isinstance(func, str | nn.Module):
                model, self._tokenizers[i] = _loaded(func, classes[i], trust=args.trust_remote_code)
                self.funcs[i] = accelerator.prepare_model(model.eval(), evaluation_mode=True)
            elif not callable(func):
                raise ValueError(
                    f"`turn_reward_funcs[{i}]` is a {type(func).__name__}; allowed: functions, models, names."
                )

    def models(self) -> list[tuple[str, nn.Module, PreTrainedTokenizerBase]]:
        """Return the reward models with their fields and tokenizers."""
        own = self._tokenizers.items()
        return [(f"turn_reward_funcs[{i}]", self.funcs[i], tokenizer) for i, tokenizer in own]

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

        names = numbered([*map(_name, self.funcs)])
        for i, func in enumerate(self.funcs):
            more = {"trainer_state": trainer_state, "log_metric": log_metric}
            rewards = self._rewards(i, func, turns, environments, more) if turns else []
            for turn, reward in zip(turns, rewards, strict=True):
                if reward is not None:
                    table[turn.episode][turn.number] += reward
                if reward is not None and turn.episode not in rollout.repeated:
                    log_metric(f"rewards/{names[i]}/turn_mean", reward)
        return table, sums

    def _rewards(
        self,
        index: int,
        func: RewardFunc | nn.Module,
        turns: list[Turn],
        environments: list[Any] | None,
        more: dict[str, Any],
    ) -> list[float | None]:
        if isinstance(func, nn.Module):
            return self._model_rewards(func, self._tokenizers[index], turns)
        if environments is not None:
            more = {**more, "environments": [environments[turn.episode] for turn in turns]}
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

    def _model_rewards(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, turns: list[Turn]
    ) -> list[float | None]:
        rewards: list[float | None] = []
        for start in range(0, len(turns), self._batch_size):
            batch = turns[start : start + self._batch_size]
            rows = (turn.columns.get("chat_template_kwargs") or {} for turn in batch)
            options = [{**self._template_kwargs, **own} for own in rows]
            texts = [_text(tokenizer, *each) for each in zip(batch, options, strict=True)]
            inputs = tokenizer(
                text=texts,
                return_tensors="pt",
                padding=True,
                padding_side="right",
                add_special_tokens=False,
            ).to(self._accelerator.device)
            with torch.inference_mode():
                scores = model(**inputs).logits[:, 0].float()
            rewards += [check_reward(score, f"{_name(model)}()") for score in scores.tolist()]
        return rewards


def _loaded(model: Any, tokenizer: Any, *, trust: bool) -> tuple[Any, Any]:
    """Load a reward model and its tokenizer if they are not given as instances."""
    options = {"trust_remote_code": trust}
    if isinstance(model, str):
        model = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, **options)
    if tokenizer is None:
        tokenizer = AutoTokenizer.from_pretrained(get_config_model_id(model.config), **options)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def _text(tokenizer: PreTrainedTokenizerBase, turn: Turn, template_kwargs: dict[str, Any]) -> str:
    if isinstance(turn.prompt, str):
        return f"{turn.prompt}{turn.completion}"
    messages = {"messages": [*turn.prompt, *turn.completion]}
    return apply_chat_template(messages, tokenizer, **template_kwargs)["text"]


def _name(func: RewardFunc) -> str:
    if isinstance(func, nn.Module):
        return get_config_model_id(func.config).split("/")[-1] or type(func).__name__
    return name_of(func)
