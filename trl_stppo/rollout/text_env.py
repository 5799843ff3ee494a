"""Episodes of text environments, a whole batch at a time.

The loop: reset, then until every episode has ended: generate one turn for all that are running, let
each environment step, append its observation. One append-only row of ids per episode; the record of
its turns is written as they happen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import EnvironmentContractError
from .chat import ChatRenderer, Message, with_observation
from .record import RolloutRecord, StopReason, check_reward

# (prompt ids of the running episodes, limit) -> sampled ids and, where the backend has them, logprobs
GenerateTurn = Callable[[list[list[int]], int], tuple[list[list[int]], list[list[float]] | None]]


@dataclass
class Episode:
    """One running episode. `ids`, `mask` and `logprobs` cover the tokens after the prompt."""

    env: Any
    prompt_ids: list[int]
    conversational: bool
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turn_spans: list[tuple[int, int]] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    valid_actions: list[bool] = field(default_factory=list)
    success: bool | None = None
    stop_reason: StopReason | None = None

    def append(self, ids: list[int], logprobs: list[float] | None, *, sampled: bool) -> None:
        """Add tokens at the end; nothing before them ever changes."""
        self.ids += ids
        self.mask += [int(sampled)] * len(ids)
        self.logprobs += logprobs if logprobs is not None else [0.0] * len(ids)


@dataclass
class Limits:
    """Budgets of one episode.

    Attributes:
        max_turns: turns, `None` for as many as the budget allows.
        max_turn_tokens: sampled tokens of one turn, `None` for as many as are left.
        max_completion_tokens: all tokens after the prompt, observations included.
    """

    max_turns: int | None
    max_turn_tokens: int | None
    max_completion_tokens: int

    def turn_tokens(self, episode: Episode) -> int:
        """Tokens the next turn may have."""
        left = self.max_completion_tokens - len(episode.ids)
        return left if self.max_turn_tokens is None else min(left, self.max_turn_tokens)


class TextEnvRollout:
    """Runs text environments for a batch of dataset rows.

    Args:
        factories: name -> environment factory; the row's `environment` column chooses (`None` is
            the single unnamed one). Instances are kept and reset.
        limits: budgets of an episode.
    """

    def __init__(self, factories: dict[str | None, Callable[[], Any]], limits: Limits) -> None:
        self.factories = factories
        self.limits = limits
        self._pool: dict[str | None, list[Any]] = {name: [] for name in factories}

    def run(
        self,
        rows: Sequence[dict[str, Any]],
        prompts: Sequence[list[Message] | str],
        renderer: ChatRenderer,
        generate: GenerateTurn,
        record: RolloutRecord,
    ) -> dict[str, Any]:
        """Play one episode per row.

        Returns:
            TRL's rollout result: `prompt_ids`, `completion_ids`, `logprobs` (or None), `env_mask`.

        Raises:
            EnvironmentContractError: an environment broke the reset/step contract.
            ValueError: a reward that is not finite, or a prompt that leaves no token to sample.
        """
        started = time.perf_counter()
        episodes = self._reset(rows, prompts, renderer)
        record.env_seconds += time.perf_counter() - started
        has_logprobs = True
        while running := [e for e in episodes if e.stop_reason is None]:
            limit = max(self.limits.turn_tokens(episode) for episode in running)
            started = time.perf_counter()
            ids, logprobs = generate([e.prompt_ids + e.ids for e in running], limit)
            record.generation_seconds += time.perf_counter() - started
            has_logprobs = has_logprobs and logprobs is not None
            started = time.perf_counter()
            for i, episode in enumerate(running):
                self._play_turn(episode, ids[i], logprobs[i] if logprobs else None, renderer)
            record.env_seconds += time.perf_counter() - started
        _write(episodes, record)
        return {
            "prompt_ids": [e.prompt_ids for e in episodes],
            "completion_ids": [e.ids for e in episodes],
            "logprobs": [e.logprobs for e in episodes] if has_logprobs else None,
            "env_mask": [e.mask for e in episodes],
        }

    def _reset(
        self,
        rows: Sequence[dict[str, Any]],
        prompts: Sequence[list[Message] | str],
        renderer: ChatRenderer,
    ) -> list[Episode]:
        episodes, used = [], dict.fromkeys(self.factories, 0)
        named = None not in self.factories
        for row, prompt in zip(rows, prompts, strict=True):
            name = row.get("environment") if named else None
            if name not in self.factories:
                raise ValueError(
                    f"Row has `environment={name!r}`; allowed are {list(self.factories)}, the keys of "
                    f"`environment_factory`."
                )
            pool = self._pool[name]
            if used[name] == len(pool):
                pool.append(self.factories[name]())
            env = pool[used[name]]
            used[name] += 1
            arguments = {k: v for k, v in row.items() if not (named and k == "environment")}
            opening = with_observation(prompt, _opening(env, env.reset(**arguments)))
            ids = renderer.prompt_ids(opening)
            episodes.append(Episode(env, ids, conversational=not isinstance(opening, str)))
        return episodes

    def _play_turn(
        self,
        episode: Episode,
        ids: list[int],
        logprobs: list[float] | None,
        renderer: ChatRenderer,
    ) -> None:
        limit = self.limits.turn_tokens(episode)
        ids, logprobs = ids[:limit], logprobs[:limit] if logprobs is not None else None
        start = len(episode.ids)
        episode.append(ids, logprobs, sampled=True)
        episode.turn_spans.append((start, len(episode.ids)))
        observation, reward, terminated, truncated, info = _checked_step(
            episode.env, renderer.decode_action(ids)
        )
        episode.turn_rewards.append(reward)
        if "valid_action" in info:
            episode.valid_actions.append(bool(info["valid_action"]))
        if info.get("success") is not None:
            episode.success = bool(info["success"])
        if terminated or truncated:
            episode.stop_reason = StopReason.TERMINATED if terminated else StopReason.TRUNCATED
        elif self.limits.max_turns is not None and len(episode.turn_spans) >= self.limits.max_turns:
            episode.stop_reason = StopReason.MAX_TURNS
        else:
            self._observe(
                episode, observation, bool(ids) and ids[-1] in renderer.eos_token_ids, renderer
            )

    def _observe(
        self, episode: Episode, observation: str, turn_ended: bool, renderer: ChatRenderer
    ) -> None:
        """Append an observation, unless it would leave no room for another turn."""
        ids = renderer.observation_ids(
            observation, conversational=episode.conversational, turn_ended=turn_ended
        )
        if len(episode.ids) + len(ids) >= self.limits.max_completion_tokens:
            episode.stop_reason = StopReason.TOKEN_BUDGET
            return
        episode.append(ids, None, sampled=False)


def _opening(env: Any, result: Any) -> str:
    observation = result[0] if isinstance(result, tuple) and len(result) == 2 else result
    if not isinstance(observation, str | None):
        raise EnvironmentContractError(
            f"{type(env).__name__}.reset returned {result!r}; allowed are (observation, info) with a "
            f"str observation, or a str."
        )
    return observation or ""


def _checked_step(env: Any, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
    result = env.step(action)
    name = f"{type(env).__name__}.step"
    if not isinstance(result, tuple) or len(result) != 5:
        raise EnvironmentContractError(
            f"{name} returned {result!r}; allowed is (observation, reward, terminated, truncated, info)."
        )
    observation, reward, terminated, truncated, info = result
    if not isinstance(observation, str) or not isinstance(info, dict):
        raise EnvironmentContractError(
            f"{name} returned a {type(observation).__name__} observation and a {type(info).__name__} "
            f"info; allowed are str and dict."
        )
    return (
        observation,
        check_reward(reward, f"{name} reward"),
        bool(terminated),
        bool(truncated),
        info,
    )


def _write(episodes: list[Episode], record: RolloutRecord) -> None:
    record.turn_spans = [e.turn_spans for e in episodes]
    record.turn_rewards = [e.turn_rewards for e in episodes]
    record.stop_reasons = [e.stop_reason for e in episodes if e.stop_reason is not None]
    record.terminated = [e.stop_reason is StopReason.TERMINATED for e in episodes]
    record.truncated = [e.stop_reason is not StopReason.TERMINATED for e in episodes]
    record.success = [e.success for e in episodes]
    record.valid_actions = [e.valid_actions for e in episodes]
    record.check_turn_rewards()
