"""Advances the episodes of one rollout, each at its own pace."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ..envs._check_values import described
from ..generation.protocol import Backend, TurnRequest, TurnResult
from ..threads import DaemonThread
from .agent_driver import AgentDriver
from .calls import CallResult
from .chat import ChatRenderer, Message, with_opening
from .driver import Driver, Opening, Outcome
from .environments import EnvironmentPool, close_environment
from .episode import Context, Episode, Limits
from .messages import check_turn
from .record import FINAL, StopReason
from .tool_driver import is_valid
from .workers import EnvironmentCalls

# Longest observation that is tokenised, in characters per token of room; the rest is cut before.
MAX_CHARS_PER_TOKEN = 256
# Characters of an opening that are tokenised first, per token of the context, to check that it fits.
OPENING_CHARS_PER_TOKEN = 8
# Seconds for more episodes to become ready before a backend samples a batch at once.
LINGER_SECONDS = 0.05


@dataclass(eq=False, repr=False)
class Parts:
    """The parts of a rollout engine that are made once and used by every rollout.

    Args:
        drivers: by key of the environment factory; None is the single unnamed one, or no factory.
        pool: environment instances, None if there are only tools.
        calls: runs the environments.
        limits: budgets of an episode.
    """

    drivers: dict[str | None, Driver]
    pool: EnvironmentPool | None
    calls: EnvironmentCalls
    limits: Limits


class EpisodeLoop:
    """Plays one rollout; `label` names its rows. `_calls` has the kind of each episode's running call."""

    def __init__(
        self,
        parts: Parts,
        episodes: list[Episode],
        indices: list[int],
        renderer: ChatRenderer,
        backend: Backend,
        seeds: list[tuple[int, ...]],
        label: Callable[[int], str],
    ) -> None:
        self._parts, self._limits, self._label = parts, parts.limits, label
        self._indices = indices
        self._renderer, self._backend = renderer, backend
        self._seeds = seeds
        self._waiting = deque(episodes)
        self._running: dict[int, Episode] = {}
        self._calls: dict[int, str] = {}
        # Contexts of agents whose computations the backend keeps.
        self._held: dict[int, Context] = {}
        self.env_seconds = self.wait_seconds = self.generation_seconds = 0.0

    def play(self) -> None:
        """Play until every episode has ended."""
        try:
            while self._waiting or self._running:
                self._admit()
                self._generate()
                self._answer()
        finally:
            # Episodes are left only after an exception.
            for row, episode in self._running.items():
                self._parts.calls.cancel(row)
                # Its environment may still be busy.
                if row in self._calls:
                    self._discard(episode)
                self._backend.release(row)
                self._driver(episode).release(episode)
            self._parts.calls.rest()

    # ---------------------------------------------------------------- scheduling

    def _admit(self) -> None:
        """Start waiting episodes while the backend has room for them."""
        capacity = self._backend.capacity
        while self._waiting and (capacity is None or len(self._running) < capacity):
            episode = self._waiting.popleft()
            self._running[episode.row] = episode
            index, seed = self._indices[episode.row], self._episode_seed(episode)
            opening = self._driver(episode).opening(episode, index, seed)
            if opening is None:
                self._opened(episode, Opening(None))
            else:
                self._call(episode, "open", opening)

    def _generate(self) -> None:
        if not self._backend.busy:
            return
        if getattr(self._backend, "whole_batches", False):
            self._linger()
        started = time.perf_counter()
        results = self._backend.step()
        self.generation_seconds += time.perf_counter() - started
        for result in results:
            self._sampled(self._running[result.key], result)

    def _linger(self) -> None:
        """Process answers for a short time, so that more episodes join the next batch of turns."""
        until = time.monotonic() + LINGER_SECONDS
        while self._calls and (left := until - time.monotonic()) > 0:
            self._answer(left)

    def _answer(self, wait: float | None = None) -> None:
        """Process the environments' answers. Block for an answer if there is no other work."""
        if wait is None:
            wait = 0.0 if self._backend.busy or not self._calls else 60.0
        started = time.perf_counter()
        results = self._parts.calls.poll(wait)
        if wait > 0.0:
            self.wait_seconds += time.perf_counter() - started
        for result in results:
            self._answered(self._running[result.key], result)

    def _call(self, episode: Episode, kind: str, func: Callable[[], object]) -> None:
        self._calls[episode.row] = kind
        self._parts.calls.submit(episode.row, func, self._limits.env_timeout_seconds)

    def _driver(self, episode: Episode) -> Driver:
        return self._parts.drivers[episode.name]

    def _episode_seed(self, episode: Episode) -> int:
        """Return a reproducible seed below 2**31 for the episode's environment."""
        number = 0
        for part in self._seeds[episode.row]:
            number = (number * 1_000_003 + part + 1) % (2**31 - 1)
        return number

    # -------------------------------------------------------------------- events

    def _answered(self, episode: Episode, result: CallResult) -> None:
        kind = self._calls.pop(episode.row)
        self.env_seconds += result.seconds
        if result.timed_out:
            message = (
                f"{self._driver(episode).type_name}: no answer in {self._limits.env_timeout_seconds} s "
                f"(`env_timeout_seconds`)"
            )
            self._fail(episode, StopReason.ENV_TIMEOUT, message)
        elif result.error is not None:
            self._fail(episode, StopReason.ENV_ERROR, described(result.error))
        elif kind == "open":
            self._opened(episode, result.value)
        elif kind == "turn":
            self._played(episode, result.value)
        else:
            episode.final_reward, late = result.value
            self._pay(episode, late)
            assert episode.stop_reason is not None
            self._finish(episode, episode.stop_reason)

    def _opened(self, episode: Episode, opening: Opening) -> None:
        episode.env = opening.env
        episode.pictures.append(opening.picture)
        episode.pays_turns = episode.pays_turns or opening.pays_turns
        if opening.outcome is not None:
            self._played(episode, opening.outcome)
            return
        prompt = with_opening(episode.prompt, opening.text)
        try:
            check_turn(prompt)
            complete = self._read_opening(episode, opening.text)
        except Exception as error:
            # Chat templates raise various errors for prompts.
            why = f"cannot be rendered: {described(error)}"
        else:
            if episode.turn_limit(self._limits) >= 1:
                episode.prompt = prompt
                self._request(episode)
                return
            why = (
                f"has {'' if complete else 'at least '}{len(episode.prompt_ids)} tokens and leaves none to "
                f"sample: the model's context has {self._limits.max_context_tokens}. Shorten the prompt, or "
                f"use a model with a longer context."
            )
        episode.prompt_ids = []
        name = self._label(episode.row)
        self._fail(episode, StopReason.ENV_ERROR, f"The prompt of {name} {why}")

    def _read_opening(self, episode: Episode, opening: str) -> bool:
        """Tokenise the prompt with the environment's opening, but stop early if a long opening does not fit.

        Returns:
            Whether the complete opening was tokenised.
        """
        if episode.prompt_ids:
            return True
        context = self._limits.max_context_tokens
        shown, most = opening, (context or 0) * OPENING_CHARS_PER_TOKEN
        while True:
            if context is not None:
                shown = opening[:most]
            episode.prompt_ids = self._prompt_ids(episode, shown)
            if context is None or shown == opening:
                return True
            # The cut may split a long token into many short ones.
            if len(episode.prompt_ids) >= context + MAX_CHARS_PER_TOKEN:
                return False
            most *= 4

    def _prompt_ids(self, episode: Episode, opening: str = "") -> list[int]:
        driver, render = self._driver(episode), self._renderer.prompt_ids
        trusted = driver.trusted_text
        return render(episode.prompt, driver.tools, opening=opening, trusted=trusted)

    def _request(self, episode: Episode, limit: int | None = None, *more_seed: int) -> None:
        """Request the next turn from the backend, with at most `limit` tokens."""
        context = episode.context
        room = context.turn_limit(self._limits)
        self._backend.add(
            TurnRequest(
                episode.row,
                context.prompt_ids + context.ids,
                room if limit is None else min(room, limit),
                (*self._seeds[episode.row], episode.num_turns, *more_seed),
            )
        )

    def _proceed(self, episode: Episode, end: StopReason | None) -> None:
        """Request the turn that answers an agent's call from the backend, or refuse the call."""
        agent = self._driver(episode)
        assert isinstance(agent, AgentDriver)
        request = None if end else agent.begin(episode)
        if request is None:
            self._call(episode, "turn", agent.refuse(episode, end or StopReason.TOKEN_BUDGET))
            return
        if self._held.get(episode.row) is not episode.context:
            self._backend.release(episode.row)
            self._held[episode.row] = episode.context
        # Calls that are not part of the episode have random numbers of their own.
        self._request(episode, request.max_tokens, *([] if request.trains else [episode.env.turns]))

    def _sampled(self, episode: Episode, result: TurnResult) -> None:
        # The environment is intact and can be used again.
        if result.error is not None:
            episode.error, episode.trains = result.error, False
            self._finish(episode, StopReason.SAMPLER_ERROR)
            return
        limit = episode.context.turn_limit(self._limits)
        if not 1 <= len(result.ids) <= limit:
            raise RuntimeError(f"The backend sampled {len(result.ids)} tokens of 1 to {limit}.")
        driver = self._driver(episode)
        if isinstance(driver, AgentDriver):
            answer, was_cut = driver.answer(episode, result)
            if was_cut:
                del self._held[episode.row]
            self._call(episode, "turn", answer)
            return
        message = driver.message(episode, result.ids)
        episode.append_turn(result.ids, result.logprobs)
        if result.version is not None:
            episode.policy_versions.append(result.version)
        episode.messages.append(message)
        call = driver.turn(episode, message)
        rounds = self._limits.max_tool_rounds
        if call is None:
            complete, last = self._renderer.ended(result.ids), StopReason.TERMINATED
            # The turn could have called a tool.
            if driver.tools:
                episode.valid_actions.append(is_valid(self._renderer, message, result.ids))
                last = StopReason.NO_ACTION
            self._end(episode, last if complete else StopReason.TOKEN_BUDGET)
        elif rounds is not None and driver.tools and episode.num_turns > rounds:
            self._end(episode, StopReason.MAX_TURNS)
        else:
            self._call(episode, "turn", call)

    def _played(self, episode: Episode, outcome: Outcome) -> None:
        if outcome.turn_rewards is not None:
            episode.turn_rewards, episode.pays_turns = outcome.turn_rewards, True
        self._pay(episode, outcome.reward)
        episode.pictures.append(outcome.picture)
        episode.tool_calls += outcome.tool_calls
        episode.tool_failures += outcome.tool_failures
        if outcome.valid_action is not None:
            episode.valid_actions.append(outcome.valid_action)
        if outcome.success is not None:
            episode.success = outcome.success
        reason = outcome.over or self._reason(episode, outcome)
        if outcome.request is not None and not outcome.request.trains and not episode.env.over:
            reason = None
        if outcome.request is not None:
            self._proceed(episode, reason)
        elif reason is not None:
            self._end(episode, reason)
        else:
            self._observe(episode, outcome.messages)

    @staticmethod
    def _pay(episode: Episode, reward: float | None) -> None:
        if reward is not None and episode.num_turns:
            episode.turn_rewards[-1] += reward
            episode.pays_turns = True

    def _reason(self, episode: Episode, outcome: Outcome) -> StopReason | None:
        limits = self._limits
        if outcome.terminated:
            return StopReason.TERMINATED
        if outcome.truncated:
            return StopReason.TRUNCATED
        if limits.max_turns is not None and episode.num_turns >= limits.max_turns:
            return StopReason.MAX_TURNS
        return None

    def _observe(self, episode: Episode, messages: list[Message]) -> None:
        """Append the observation. If it does not fit, append its beginning and end the episode."""
        episode.messages += messages
        room = episode.room(self._limits)
        most = (room + 1) * MAX_CHARS_PER_TOKEN
        shown = [{**m, "content": m["content"][:most]} for m in messages]
        try:
            ids = self._observation_ids(episode, shown)
        except Exception as error:
            # Chat templates raise various errors for messages.
            message = f"The observation cannot be rendered: {described(error)}"
            self._fail(episode, StopReason.ENV_ERROR, message)
            return
        episode.append_observation(ids[:room])
        if len(ids) >= room or shown != messages:
            self._end(episode, StopReason.TOKEN_BUDGET)
        else:
            self._request(episode)

    def _observation_ids(self, episode: Episode, messages: list[Message]) -> list[int]:
        return self._renderer.observation_ids(
            messages,
            last=episode.ids[-1],
            conversational=episode.conversational,
            trusted=self._driver(episode).trusted_text,
        )

    # ----------------------------------------------------------------------- end

    def _fail(self, episode: Episode, reason: StopReason, message: str) -> None:
        episode.error = message
        self._discard(episode, reason)
        episode.trains = False
        self._finish(episode, reason)

    def _discard(self, episode: Episode, reason: StopReason | None = None) -> None:
        if self._parts.pool is None:
            return
        env = self._parts.pool.discard(episode.name, self._indices[episode.row])
        # After other ends the environment may still be busy.
        if env is not None and reason is StopReason.ENV_ERROR:
            run_async = self._parts.calls.run_async
            DaemonThread(close_environment, "closing", env, run_async).start()

    def _end(self, episode: Episode, reason: StopReason) -> None:
        """Stop sampling for an episode and submit its scoring call. Without a call, finish the episode."""
        episode.stop_reason = reason
        self._backend.release(episode.row)
        scoring = self._driver(episode).scoring(episode)
        if scoring is None:
            self._finish(episode, reason)
        else:
            self._call(episode, "score", scoring)

    def _finish(self, episode: Episode, reason: StopReason) -> None:
        episode.stop_reason = reason
        episode.terminated = reason in FINAL
        self._backend.release(episode.row)
        del self._running[episode.row]
        self._driver(episode).release(episode)
        # `reset` never returned, or the prompt cannot be played.
        if not episode.prompt_ids:
            with suppress(Exception):
                episode.prompt_ids = self._prompt_ids(episode)
            if not episode.prompt_ids or episode.turn_limit(self._limits) < 1:
                episode.prompt_ids = [self._renderer.tokenizer.eos_token_id]
        episode.more = [context for context in episode.more if context.turns]
        for context in episode.contexts:
            # TRL cannot collate an empty row; no mask covers this token.
            if not context.ids:
                context.append_observation([self._renderer.tokenizer.eos_token_id])
            context.check_prefix()
