"""Plays the episodes of a rollout, each at its own pace.

The caller's thread generates and keeps all state; environments run on workers. The cycle of an
episode: its environment answers -> the answer is appended to its row -> the backend samples its
next turn, together with all other ready episodes -> the turn goes to its environment. No episode is
delayed by a slower episode, and a failure of an environment ends only its episode.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..envs.base import described
from ..errors import EnvironmentFailureError
from ..generation.protocol import Backend, TurnRequest, TurnResult
from .chat import ChatRenderer, Message, with_opening
from .driver import Driver, Outcome
from .environments import EnvironmentPool, close_environment
from .episode import Context, Durations, Episode, Limits
from .images import Content, Image, clipped, images_of
from .messages import check_turn
from .record import FINAL, StopReason
from .tool_driver import is_valid
from .workers import CallResult, EnvironmentCalls

logger = logging.getLogger(__name__)

# Continues an episode with the result of its call.
Proceed = Callable[[Episode, Any], None]
# Failed episodes in a row after which the environment counts as broken, not flaky.
MAX_FAILURES_IN_A_ROW = 64
# Time for all environments together to close, in seconds.
CLOSE_SECONDS = 2.0
# Longest opening or observation that is tokenised, in characters per token of room.
MAX_CHARS_PER_TOKEN = 256
# Seconds in which more episodes may become ready before a backend samples a whole batch.
LINGER_SECONDS = 0.05
# Seconds of a rollout until its first report of progress; the time to each later report doubles.
REPORT_SECONDS = 20.0


class RolloutEngine:
    """Plays episodes of any number of named environments.

    The keys of `drivers` are names of environment factories; None is the single unnamed factory, or none.
    """

    def __init__(
        self,
        drivers: dict[str | None, Driver],
        pool: EnvironmentPool,
        calls: EnvironmentCalls,
        limits: Limits,
    ) -> None:
        self.drivers, self.pool, self.calls, self.limits = drivers, pool, calls, limits
        self.failures_in_a_row = 0
        # A long rollout calls this with the numbers of ended episodes, of all episodes, and of turns.
        self.on_progress: Callable[[int, int, int], None] = lambda ended, episodes, turns: None
        # Newest answer of a turn with a failed tool call, and warnings that were given already.
        self.tool_error, self.warned = "", set[str]()

    def run(
        self,
        rows: Sequence[dict[str, Any]],
        prompts: Sequence[list[Message] | str],
        renderer: ChatRenderer,
        backend: Backend,
        seed: tuple[int, ...] = (0,),
        first_row: int = 0,
        names: Sequence[tuple[int, ...]] | None = None,
        prompt_ids: Sequence[list[int]] | None = None,
        label: Callable[[int], str] | None = None,
    ) -> tuple[list[Episode], Durations]:
        """Play one episode per data set row.

        `rows` are columns for `reset`. An episode's seed is `seed` with its entry of `names`, by default its
        index from `first_row` on. `prompt_ids` replace the rendered prompts. `label` names the rows, by
        default by `names`.
        """
        names = names or [(first_row + row,) for row in range(len(rows))]
        label = label or (lambda row: f"row {names[row][0]}")
        episodes, used, named = [], Counter[str | None](), None not in self.drivers
        for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            name = row.get("environment") if named else None
            if name not in self.drivers:
                raise ValueError(f"`environment={name!r}`: allowed are {list(self.drivers)}.")
            driver = self.drivers[name]
            if driver.tools and isinstance(prompt, str):
                raise ValueError("`prompt` is a string; tools need messages.")
            columns = {k: v for k, v in row.items() if not (named and k == "environment")}
            episode = Episode(number, columns, prompt, name, driver.type_name, instance=used[name])
            episode.prompt_ids = list(prompt_ids[number]) if prompt_ids is not None else []
            episodes.append(episode)
            used[name] += 1
        rollout = _Rollout(self, episodes, renderer, backend, [(*seed, *n) for n in names], label)
        rollout.play()
        self._report(episodes)
        return episodes, rollout.durations

    def close(self) -> None:
        """Close the environments within a short time, and release the workers."""
        arguments = (self.calls.run_async,)
        closing = threading.Thread(target=self.pool.close, args=arguments, name="closing", daemon=True)
        try:
            closing.start()
            closing.join(CLOSE_SECONDS)
        except RuntimeError:
            # Ignore the error, because an ending interpreter starts no more threads.
            logger.debug("environments are not closed: the interpreter is ending")
        for driver in self.drivers.values():
            driver.close()
        self.calls.close()

    def _report(self, episodes: list[Episode]) -> None:
        """Warn of failed episodes, and raise an error after too many failures in a row."""
        for episode in episodes:
            self.failures_in_a_row = 0 if episode.trains else self.failures_in_a_row + 1
        errors = [str(episode.error) for episode in episodes if not episode.trains]
        if errors:
            common = "; ".join(f"{text} ({n}x)" for text, n in Counter(errors).most_common(3))
            text = "%d of %d episodes ended in a failure: %s"
            logger.warning(text, len(errors), len(episodes), common)
        called = sum(episode.tool_calls for episode in episodes)
        failed = sum(episode.tool_failures for episode in episodes)
        if called == failed > 0 and "tools" not in self.warned:
            self.warned.add("tools")
            text = "All %d tool calls of a rollout failed. The newest error: %s"
            logger.warning(text, called, self.tool_error)
        agents = any(driver.calls_model for driver in self.drivers.values())
        silent = sum(episode.trains and not episode.num_turns for episode in episodes)
        if agents and silent:
            text = "%d of %d episodes ended without an answered call that trains."
            logger.warning(text, silent, len(episodes))
        if self.failures_in_a_row >= max(MAX_FAILURES_IN_A_ROW, len(episodes)):
            count, self.failures_in_a_row = self.failures_in_a_row, 0
            advice = "" if agents else " Try `trl-stppo env check`."
            raise EnvironmentFailureError(
                f"The last {count} episodes all ended in a failure. The newest: "
                f"{errors[-1].rstrip('.')}.{advice}"
            )


class _Rollout:
    """One rollout of an engine. `label` names its rows; `_calls` has a callback for each running call."""

    def __init__(
        self,
        engine: RolloutEngine,
        episodes: list[Episode],
        renderer: ChatRenderer,
        backend: Backend,
        seeds: list[tuple[int, ...]],
        label: Callable[[int], str],
    ) -> None:
        self._engine, self._limits, self._label = engine, engine.limits, label
        self._renderer, self._backend, self._seeds = renderer, backend, seeds
        self._waiting, self._episodes = deque(episodes), episodes
        self._running: dict[int, Episode] = {}
        self._calls: dict[int, Proceed] = {}
        # Row -> the context for which the backend keeps the attention's keys and values.
        self._held: dict[int, Context] = {}
        self.durations = Durations()

    def play(self) -> None:
        """Play until every episode has ended."""
        began, report, number = time.monotonic(), REPORT_SECONDS, len(self._waiting)
        try:
            while self._waiting or self._running:
                self._admit()
                self._generate()
                self._answer()
                left, elapsed = len(self._waiting) + len(self._running), time.monotonic() - began
                if elapsed > report:
                    report = 2 * max(report, elapsed)
                    if left:
                        turns = sum(episode.num_turns for episode in self._episodes)
                        self._engine.on_progress(number - left, number, turns)
        finally:
            # After an exception some episodes still run, so release what they hold.
            for row, episode in self._running.items():
                self._engine.calls.cancel(row)
                # Discard the environment, because it may still be busy.
                if row in self._calls:
                    self._discard(episode)
                self._backend.release(row)
                self._driver(episode).release(episode)

    def _admit(self) -> None:
        """Start waiting episodes while the backend has room for them."""
        capacity = self._backend.capacity
        while self._waiting and (capacity is None or len(self._running) < capacity):
            episode = self._waiting.popleft()
            self._running[episode.row] = episode
            opening = self._driver(episode).opening(episode, self._episode_seed(episode))
            if opening is None:
                self._opened(episode, Outcome())
            else:
                self._call(episode, self._played if episode.env else self._opened, opening)

    def _generate(self) -> None:
        if not self._backend.busy:
            return
        # Before a backend samples a whole batch, give other episodes time to join it.
        until = time.monotonic() + LINGER_SECONDS
        while getattr(self._backend, "whole_batches", False) and self._calls:
            if (left := until - time.monotonic()) <= 0:
                break
            self._answer(left)
        started = time.perf_counter()
        results = self._backend.step()
        self.durations.generation += time.perf_counter() - started
        for result in results:
            self._sampled(self._running[result.key], result)

    def _answer(self, wait: float | None = None) -> None:
        """Process the environments' answers. Block for an answer if there is no other work."""
        if wait is None:
            wait = 0.0 if self._backend.busy or not self._calls else 60.0
        started = time.perf_counter()
        results = self._engine.calls.poll(wait)
        if wait > 0.0:
            self.durations.waiting += time.perf_counter() - started
        for result in results:
            self._answered(self._running[result.key], result)

    def _call(self, episode: Episode, proceed: Proceed, func: Callable[[], object]) -> None:
        self._calls[episode.row] = proceed
        self._engine.calls.submit(episode.row, func, self._limits.env_timeout_seconds)

    def _driver(self, episode: Episode) -> Driver:
        return self._engine.drivers[episode.name]

    def _episode_seed(self, episode: Episode) -> int:
        """Return a reproducible seed below 2**31 for the episode's environment."""
        number = 0
        for part in self._seeds[episode.row]:
            number = (number * 1_000_003 + part + 1) % (2**31 - 1)
        return number

    def _answered(self, episode: Episode, result: CallResult) -> None:
        proceed = self._calls.pop(episode.row)
        self.durations.environments += result.seconds
        if result.timed_out:
            who, limit = self._driver(episode).type_name, self._limits.env_timeout_seconds
            message = f"{who}: no answer in {limit} s (`env_timeout_seconds`)"
            self._fail(episode, StopReason.ENV_TIMEOUT, message)
        elif result.error is not None:
            self._fail(episode, StopReason.ENV_ERROR, described(result.error))
        else:
            proceed(episode, result.value)

    def _opened(self, episode: Episode, opening: Outcome) -> None:
        episode.env = opening.env
        episode.pictures.append(opening.picture)
        episode.has_turn_rewards |= opening.has_turn_rewards
        context = self._limits.max_context_tokens
        most = None if context is None else context * MAX_CHARS_PER_TOKEN
        shown = clipped(opening.text, most)
        least = "at least " if shown != opening.text else ""
        try:
            episode.prompt = self._renderer.read(episode.prompt)
            prompt = with_opening(episode.prompt, opening.text)
            check_turn(prompt)
            if not episode.prompt_ids:
                self._render_prompt(episode, shown)
        except Exception as error:
            # Chat templates raise various errors for prompts.
            why = f"cannot be rendered: {described(error)}"
        else:
            if episode.turn_limit(self._limits) >= 1 and not least:
                episode.prompt = prompt
                self._request(episode)
                return
            why = (
                f"has {least}{len(episode.prompt_ids)} tokens and leaves none to sample: the model's context "
                f"has {context}. Shorten the prompt, or use a model with a longer context."
            )
            if episode.images:
                why += f" A smaller `size` of the processor shrinks its {len(episode.images)} image(s)."
        episode.prompt_ids, episode.images = [], []
        name = self._label(episode.row)
        self._fail(episode, StopReason.ENV_ERROR, f"The prompt of {name} {why}")

    def _render_prompt(self, episode: Episode, opening: Content = "") -> None:
        driver, render = self._driver(episode), self._renderer.for_row(episode.columns).prompt_ids
        trusted = driver.trusted_text
        images = self._images(with_opening(episode.prompt, opening))
        episode.prompt_ids = render(episode.prompt, driver.tools, opening=opening, trusted=trusted)
        episode.images = images

    def _images(self, messages: Any) -> list[Image]:
        """Return the images of messages, or raise ValueError if no context can hold them."""
        images, most = images_of(messages), self._limits.max_images
        if most is not None and len(images) > most:
            raise ValueError(f"it has {len(images)} images; allowed are {most} (`max_images`)")
        return images

    def _request(self, episode: Episode, limit: int | None = None, *more_seed: int) -> None:
        """Request the next turn from the backend, with at most `limit` tokens."""
        context = episode.context
        if self._held.setdefault(episode.row, context) is not context:
            self._backend.release(episode.row)
            self._held[episode.row] = context
        room = context.turn_limit(self._limits)
        self._backend.add(
            TurnRequest(
                episode.row,
                context.prompt_ids + context.ids,
                room if limit is None else min(room, limit),
                (*self._seeds[episode.row], episode.num_turns, *more_seed),
                tuple(context.images),
            )
        )

    def _proceed(self, episode: Episode, end: StopReason | None) -> None:
        """Request the turn that answers an agent's call from the backend, or refuse the call."""
        driver = self._driver(episode)
        request = None if end else driver.begin(episode)
        if request is None:
            reason = end or StopReason.TOKEN_BUDGET
            self._call(episode, self._played, driver.refuse(episode, reason))
            return
        # Calls that are not part of the episode have separate random numbers.
        self._request(episode, request.max_tokens, *([] if request.trains else [episode.env.turns]))

    def _sampled(self, episode: Episode, result: TurnResult) -> None:
        limit = episode.context.turn_limit(self._limits)
        if not 1 <= len(result.ids) <= limit:
            raise RuntimeError(f"The backend sampled {len(result.ids)} tokens of 1 to {limit}.")
        driver = self._driver(episode)
        if (answered := driver.answer(episode, result)) is not None:
            answer, was_cut = answered
            if was_cut:
                # The backend's cache has the whole turn, and the episode only its beginning.
                self._backend.release(episode.row)
            self._call(episode, self._played, answer)
            return
        message = driver.message(episode, result.ids)
        cut_by_turn = limit < episode.context.room(self._limits)
        episode.append_turn(result.ids, result.logprobs, episode.context)
        if result.version is not None:
            episode.policy_versions.append(result.version)
        episode.messages.append(message)
        call = driver.turn(episode, message)
        rounds = self._limits.max_tool_rounds
        if call is None:
            complete, last = self._renderer.ended(result.ids), StopReason.TERMINATED
            # A turn without a call may be an invalid action, but only if there are tools.
            if driver.tools:
                episode.valid_actions.append(is_valid(self._renderer, message, result.ids))
                last = StopReason.NO_ACTION
            cut = StopReason.MAX_TURN_TOKENS if cut_by_turn else StopReason.TOKEN_BUDGET
            self._end(episode, last if complete else cut)
        elif rounds is not None and driver.tools and episode.num_turns > rounds:
            self._end(episode, StopReason.MAX_TURNS)
        else:
            self._call(episode, self._played, call)

    def _played(self, episode: Episode, outcome: Outcome) -> None:
        if outcome.turn_rewards is not None:
            episode.turn_rewards, episode.has_turn_rewards = outcome.turn_rewards, True
        self._add_reward(episode, outcome.reward)
        episode.pictures.append(outcome.picture)
        episode.tool_calls += outcome.tool_calls
        episode.tool_failures += outcome.tool_failures
        if outcome.tool_failures:
            self._engine.tool_error = outcome.messages[-1]["content"]
        if outcome.valid_action is not None:
            episode.valid_actions.append(outcome.valid_action)
        if outcome.success is not None:
            episode.success = outcome.success
        reason, most = outcome.over, self._limits.max_turns
        if reason is None and outcome.terminated:
            reason = StopReason.TERMINATED
        elif reason is None and outcome.truncated:
            reason = StopReason.TRUNCATED
        elif reason is None and most is not None and episode.num_turns >= most:
            reason = StopReason.MAX_TURNS
        if outcome.request is not None and not outcome.request.trains and not episode.env.over:
            reason = None
        if outcome.request is not None:
            self._proceed(episode, reason)
        elif reason is not None:
            self._end(episode, reason)
        else:
            self._observe(episode, outcome.messages)

    @staticmethod
    def _add_reward(episode: Episode, reward: float | None) -> None:
        if reward is not None and episode.num_turns:
            episode.turn_rewards[-1] += reward
            episode.has_turn_rewards = True

    def _observe(self, episode: Episode, messages: list[Message]) -> None:
        """Append the observation. If it does not fit, append its beginning and end the episode."""
        episode.messages += messages
        last, reader = episode.context.ids[-1], self._renderer.reader
        try:
            images = self._images(messages)
            self._forget_images(episode, len(images))
            context = episode.context
            room = context.room(self._limits)
            most = (room + 1) * MAX_CHARS_PER_TOKEN
            shown = [{**m, "content": clipped(m["content"], most)} for m in messages]
            ids = self._renderer.for_row(episode.columns).observation_ids(
                shown,
                last=last,
                conversational=episode.conversational,
                trusted=self._driver(episode).trusted_text,
            )
        except Exception as error:
            # Chat templates raise various errors for messages.
            message = f"The observation cannot be rendered: {described(error)}"
            self._fail(episode, StopReason.ENV_ERROR, message)
            return
        kept = ids[:room]
        if images and reader is not None:
            kept, images = reader.fitting(ids, images, room)
            context.images += images
        context.append_observation(kept)
        if len(ids) >= room or shown != messages:
            self._end(episode, StopReason.TOKEN_BUDGET)
        else:
            self._request(episode)

    def _forget_images(self, episode: Episode, new: int) -> None:
        """Open a context without the oldest images if the present one cannot hold `new` more images."""
        before, most, reader = episode.context, self._limits.max_images, self._renderer.reader
        count = len(before.images) + new
        if reader is None or most is None or count <= most:
            return
        # Keep half of the images, because each new context is read anew as a whole.
        drop = min(count - max(1, most // 2), len(before.images))
        row, images = before.prompt_ids + before.ids, before.images
        ids, kept = reader.without_oldest(row, images, drop)
        episode.current = Context(prompt_ids=ids, images=kept)
        episode.more.append(episode.current)
        episode.opened["rewritten"] += 1

    def _fail(self, episode: Episode, reason: StopReason, message: str) -> None:
        episode.error = message
        self._discard(episode, reason)
        self._finish(episode, reason)

    def _discard(self, episode: Episode, reason: StopReason | None = None) -> None:
        env = self._engine.pool.discard(episode.name, episode.instance)
        # Close the environment only after an error, because it may still be busy after other ends.
        if env is not None and reason is StopReason.ENV_ERROR:
            arguments = (env, self._engine.calls.run_async)
            threading.Thread(target=close_environment, args=arguments, name="closing", daemon=True).start()

    def _end(self, episode: Episode, reason: StopReason) -> None:
        """Stop sampling for an episode and submit its scoring call. Without a call, finish the episode."""
        episode.stop_reason = reason
        self._backend.release(episode.row)
        scoring = self._driver(episode).scoring(episode)
        if scoring is None:
            self._finish(episode, reason)
        else:
            self._call(episode, self._scored, scoring)

    def _scored(self, episode: Episode, rewards: tuple[float | None, float | None]) -> None:
        episode.final_reward, late = rewards
        self._add_reward(episode, late)
        assert episode.stop_reason is not None
        self._finish(episode, episode.stop_reason)

    def _finish(self, episode: Episode, reason: StopReason) -> None:
        episode.stop_reason = reason
        episode.terminated = reason in FINAL
        self._backend.release(episode.row)
        del self._running[episode.row]
        self._driver(episode).release(episode)
        # The prompt is missing if `reset` never returned or the prompt cannot be played.
        if not episode.prompt_ids:
            with suppress(Exception):
                episode.prompt = self._renderer.read(episode.prompt)
                self._render_prompt(episode)
            if not episode.prompt_ids or episode.turn_limit(self._limits) < 1:
                episode.prompt_ids = [self._renderer.tokenizer.eos_token_id]
                episode.images = []
        # Tokens after the last turn are an observation that was cut: the state in which the episode ended.
        episode.more = [context for context in episode.more if context.turns or context.ids]
        for context in episode.contexts:
            # Add a token that no mask covers, because TRL cannot collate an empty row.
            if not context.ids:
                context.append_observation([self._renderer.tokenizer.eos_token_id])
