"""Plays agents: functions with a loop of their own that call the policy through OpenAI's client.

An agent is driven like an environment: its opening is its first call, its answer to a turn is its next call
or its end. So limits, failures, deadlines, seeds and backends work as for environments. Calls of one episode
are answered one after another; episodes run at the same time.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ..generation.protocol import TurnResult
from .chat import ChatRenderer, Message
from .contexts import AgentContexts, AgentRequest, cut_at
from .driver import Call, Driver, Outcome
from .episode import Episode, Limits
from .openai_wire import (
    AgentEndpoint,
    Answers,
    RefusedRequest,
    answer_message,
    completion,
    make_clients,
    read_message,
)
from .record import StopReason, check_reward
from .reward_funcs import is_async
from .tool_driver import Parse, is_valid

logger = logging.getLogger(__name__)

AgentFunc = Callable[[Any, dict[str, Any]], Any]
# Clients in this process use this address; they open no socket.
ADDRESS = "http://policy.invalid/v1"
# Number of calls in a row that do not fit into a context or cannot be rendered, until the episode ends.
MAX_REFUSED = 3
# Calls after the end that get an error. A further call ends its thread or task, which might call forever.
MAX_LATE = 3
RESULT_KEYS = ("reward", "turn_rewards", "success", "truncated")
# Error that answers an agent's calls after the end of its episode.
EPISODE_OVER = RefusedRequest(403, "The episode is over: return from the agent.", "episode_over")


class AgentSession:
    """One running agent, with the requests that it makes and its result."""

    def __init__(
        self,
        agent: AgentFunc,
        row: dict[str, Any],
        address: str,
        contexts: AgentContexts,
        warn: Callable[[list[str]], None],
        see: Callable[[Any], Any] = lambda messages: messages,
    ) -> None:
        self._agent, self._row, self.contexts = agent, row, contexts
        self.key = secrets.token_urlsafe(32)
        self.answers = Answers(self._emit, warn, see)
        self.clients = make_clients(self.answers, address, self.key)
        # The request that has no answer yet.
        self.pending: AgentRequest | None = None
        # The limit that has ended the episode.
        self.over: StopReason | None = None
        # Number of answers, of refusals in a row, and of calls after the end.
        self.turns = self.refused = self.late = 0
        # The error of a chat template that cannot render the pending call.
        self.error: Exception | None = None
        self.names: dict[str, int] = {}
        self._lock = threading.Lock()
        self._events: deque[AgentRequest | tuple[Any, BaseException | None]] = deque()
        self._waiter: Future[Any] | None = None
        self._stop: Callable[[], object] = lambda: None
        self.closed = False

    def _emit(self, event: Any) -> None:
        with self._lock:
            if self.closed and isinstance(event, AgentRequest):
                self.late += 1
                if self.late > MAX_LATE:
                    event.answer.cancel()
                _refuse(event, EPISODE_OVER)
                return
            waiter, self._waiter = self._waiter, None
            if waiter is None or not waiter.set_running_or_notify_cancel():
                self._events.append(event)
                return
        waiter.set_result(event)

    async def _run_async(self) -> None:
        try:
            self._emit((await self._agent(self.clients[0], self._row), None))
        except BaseException as error:
            # Catch SystemExit too, because it would end the event loop.
            self._emit((None, error))

    def _run(self) -> None:
        try:
            self._emit((self._agent(self.clients[1], self._row), None))
        except BaseException as error:
            self._emit((None, error))

    async def start(self) -> AgentRequest | Any:
        """Start the agent. Return its first request, or its result if it makes no request."""
        if is_async(self._agent):
            loop = asyncio.get_running_loop()
            task = loop.create_task(self._run_async())
            self._stop = lambda: loop.call_soon_threadsafe(task.cancel)
        else:
            threading.Thread(target=self._run, name="agent", daemon=True).start()
        return await self.next()

    async def next(self) -> AgentRequest | Any:
        """Return the agent's next request, or its result if the agent has returned; raise its exception."""
        with self._lock:
            event = self._events.popleft() if self._events else None
            waiter = self._waiter = Future[Any]() if event is None else None
        if waiter is not None:
            event = await asyncio.wrap_future(waiter)
        if isinstance(event, AgentRequest):
            self.pending = event
            return event
        assert event is not None
        value, error = event
        if error is not None and self.refused and self.error is None:
            self.over = self.over or StopReason.TOKEN_BUDGET
        if error is not None and self.over is None:
            raise error
        return value if error is None else None

    def close(self) -> None:
        """End the agent. Its pending and later calls get an error."""
        with self._lock:
            self.closed = True
            waiting = [self.pending, *self._events]
        self.answers.asked.clear()
        for pending in waiting:
            if isinstance(pending, AgentRequest):
                _refuse(pending, EPISODE_OVER)
        # Ignore the error if the agent's event loop has ended, and the task with it.
        with suppress(RuntimeError):
            self._stop()


def _refuse(request: AgentRequest, refused: RefusedRequest) -> None:
    if not request.answer.done():
        request.answer.set_result(refused.response)


class AgentDriver(Driver):
    """Driver of the caller's agent function. `answer` plays the agent's turns.

    `agent`: `(client, row)`, asynchronous or not; returns a reward, a dict of `RESULT_KEYS`, or None.
    `endpoint` is for agents in other processes.
    """

    calls_model = True
    trusted_text = False

    def __init__(
        self,
        agent: AgentFunc,
        renderer: ChatRenderer,
        parse: Parse,
        limits: Limits,
        *,
        endpoint: AgentEndpoint | None = None,
    ) -> None:
        self.tools: list[Any] = []
        self.type_name = getattr(agent, "__name__", type(agent).__name__)
        self._agent, self._renderer, self._parse = agent, renderer, parse
        self._limits, self._endpoint = limits, endpoint
        self._warned: set[str] = set()

    def opening(self, episode: Episode, seed: int) -> Call:
        """Make the agent's session, and return the call that starts the agent."""
        address = ADDRESS if self._endpoint is None else self._endpoint.address
        renderer = self._renderer.for_row(episode.columns)
        contexts = AgentContexts(episode, renderer, self._limits)
        # Copy the row, because an agent may append to its messages.
        row = copy.deepcopy(episode.columns)
        session = AgentSession(self._agent, row, address, contexts, self._warn, renderer.read)
        episode.env = session
        if self._endpoint is not None:
            self._endpoint.open(session)

        async def starting() -> Outcome:
            return outcome_of(episode, await session.start())

        return starting

    def begin(self, episode: Episode) -> AgentRequest | None:
        """Implement `Driver.begin`: find the context that the request's messages continue."""
        session, request = episode.env, episode.env.pending
        session.error = None
        if request.tools and "tools" not in self._warned and not self._renderer.shows_tools:
            self._warned.add("tools")
            logger.warning(
                "The chat template does not write `tools`: the model sees only what messages say of them. "
                "Set `processing_class.chat_template`, for example to TRL's `qwen2_5_chat_template`."
            )
        try:
            return request if session.contexts.begin(request) else None
        except Exception as error:
            # Chat templates raise various errors for unsupported roles, order or tools.
            session.error = error
            return None

    def answer(self, episode: Episode, result: TurnResult) -> tuple[Call, bool]:
        """Implement `Driver.answer`: cut the turn at a stop string, and answer with a message."""
        session, request, context = episode.env, episode.env.pending, episode.context
        decode = self._renderer.decode_action
        ids, stopped = cut_at(request.stop, result.ids, decode)
        logprobs = None if result.logprobs is None else result.logprobs[: len(ids)]
        before = context.prompt_ids + context.ids
        name = f"{episode.row}-{session.turns}"
        # Keep only the tokens before the stop string, so that tool calls before it still count.
        said = ids
        while stopped is not None and not stopped.startswith(decode(said)):
            said = said[:-1]
        message: Message = {"role": "assistant", "content": decode(said)}
        if request.reads_tools:
            message = self._parse(said, before, request.tools)
        text = None if message.get("tool_calls") else stopped
        answer = answer_message(message, name, stopped=text)
        session.turns += 1
        session.refused = 0
        if request.trains:
            session.names[f"chatcmpl-{name}"] = episode.num_turns
            episode.append_turn(ids, logprobs, context)
            read = read_message(answer, {})
            session.contexts.end(request, read)
            if len(episode.exchanges) == 0:
                episode.prompt, session.contexts.new = request.messages, []
            episode.messages += [*session.contexts.new, read]
            episode.exchanges.append((request.messages, read))
            if result.version is not None:
                episode.policy_versions.append(result.version)
            if request.reads_tools:
                valid = is_valid(self._renderer, message, said, request.tools, stopped)
                episode.valid_actions.append(valid)
        finish = "stop" if stopped is not None or self._renderer.ended(ids) else "length"
        finish = "tool_calls" if answer.get("tool_calls") else finish
        body = completion(f"chatcmpl-{name}", answer, finish, len(before), len(ids))

        async def proceeding() -> Outcome:
            request.answer.set_result((200, body))
            return outcome_of(episode, await session.next())

        return proceeding, stopped is not None

    def refuse(self, episode: Episode, reason: StopReason) -> Call:
        """Implement `Driver.refuse`: end the session after some refusals."""
        session, refused = episode.env, EPISODE_OVER
        if reason is StopReason.TOKEN_BUDGET:
            session.refused += 1
            full = (
                f"The messages leave no token to sample: `max_completion_length` is "
                f"{self._limits.max_completion_tokens}, the model's context "
                f"{self._limits.max_context_tokens or 'unlimited'}. Shorten the messages."
            )
            refused = RefusedRequest(400, full, "context_length_exceeded")
            if session.error is not None:
                refused = RefusedRequest(400, f"The chat template fails: {session.error}")
            ends = session.refused >= MAX_REFUSED
        else:
            # End the session if the agent calls again after the end of its episode.
            ends = session.over is not None
        if ends or reason is not StopReason.TOKEN_BUDGET:
            session.over = session.over or reason

        async def refusing() -> Outcome:
            _refuse(session.pending, refused)
            if ends:
                session.close()
                if session.error is not None and reason is StopReason.TOKEN_BUDGET:
                    raise session.error
                return Outcome(reward=0.0, over=session.over)
            return outcome_of(episode, await session.next())

        return refusing

    def release(self, episode: Episode) -> None:
        """Implement `Driver.release`: end the episode's agent and its access to the endpoint."""
        if episode.env is not None:
            episode.env.close()
            if self._endpoint is not None:
                self._endpoint.close(episode.env)

    def close(self) -> None:
        """Implement `Driver.close`: stop the HTTP endpoint, if there is one."""
        if self._endpoint is not None:
            self._endpoint.stop()

    def _warn(self, names: list[str]) -> None:
        new = [name for name in names if name not in self._warned]
        self._warned |= {*new}
        if new:
            text = "The agent sets `%s`, without effect: the policy samples as the run is set to."
            logger.warning(text, "`, `".join(new))


def outcome_of(episode: Any, event: Any) -> Outcome:
    """Convert the agent's next request or its result to the outcome of a turn."""
    session = episode.env
    if isinstance(event, AgentRequest):
        return Outcome(request=event)
    result = event if isinstance(event, dict) else {"reward": event}
    reward, success = result.get("reward"), result.get("success")
    if reward is None and session.over is not None:
        reward = 0.0
    if any(key not in RESULT_KEYS for key in result):
        raise ValueError(
            f"The agent returned {event!r:.200}; allowed: a number, a dict of {list(RESULT_KEYS)}, None."
        )
    return Outcome(
        reward=None if reward is None else check_reward(reward, "agent()"),
        terminated=not result.get("truncated"),
        truncated=bool(result.get("truncated")),
        success=None if success is None else bool(success),
        turn_rewards=_turn_rewards(result.get("turn_rewards"), session.names, episode.num_turns),
        over=session.over,
    )


def _turn_rewards(given: Any, names: dict[str, int], turns: int) -> list[float] | None:
    """Return each turn's reward, from a list in the order of calls or a dict by completion id."""
    if given is None:
        return None
    rewards = [0.0] * turns
    if isinstance(given, dict):
        unknown = [name for name in given if name not in names]
        if unknown:
            raise ValueError(f"`turn_rewards` has {unknown[0]!r}, which is no id of a completion.")
        for name, reward in given.items():
            rewards[names[name]] = reward
    else:
        rewards = list(given)
    if len(rewards) != turns:
        raise ValueError(
            f"`turn_rewards` is {given!r:.80}; allowed: {turns} numbers, or a dict by completion id."
        )
    return [check_reward(reward, f"turn_rewards[{n}]") for n, reward in enumerate(rewards)]
