"""Plays TRL's tool-method environments, plain tools and plain prompts, by TRL's own contract.

In each turn the synchronous calls run in their order, then the asynchronous calls together. A tool's error is
its answer, and the episode continues. A turn that calls no tool ends the episode.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

from ..envs.base import check_opening, content_of, is_picture, result_text, tool_names, tool_schema
from ..errors import EnvironmentContractError
from .chat import ChatRenderer, Message
from .driver import Call, Driver, Outcome, trusts
from .environments import EnvironmentPool
from .episode import Episode
from .isolation import EnvironmentDied, IsolatedEnvironment
from .messages import has_image
from .record import check_reward
from .workers import caught

# Name of a list that `reset` clears and tools append to.
TURN_REWARDS = "turn_rewards"
# Word in the tags around a tool call in most chat templates. A malformed call stays in the text with its
# tags.
CALL_TAG = "tool_call"
# Parser of a turn: (its ids, the ids before it, tools) -> assistant message, `tool_calls` included.
Parse = Callable[[list[int], list[int], list[Any]], Message]


def is_valid(
    renderer: ChatRenderer, message: Message, ids: list[int], tools: Any = (), stopped: Any = None
) -> bool:
    """Return whether a turn's calls fit the schemas of `tools`; without calls, whether none is broken."""
    if calls := message.get("tool_calls"):
        return all(_fits(call["function"], tools) for call in calls)
    tokenizer, said = renderer.tokenizer, message["content"]
    form: Any = getattr(tokenizer, "response_template", None) or {}
    call = form.get("fields", {}).get("tool_calls", {})
    begins = call.get("open_pattern") or re.escape(call.get("open", CALL_TAG))
    # Decode again, because the parser strips the control tokens of a broken call. If the message has
    # reasoning, search only its content, because reasoning may mention the tags.
    text = said if len(message) > 2 else tokenizer.decode(ids)
    parses_calls = form or getattr(tokenizer, "response_schema", None)
    if parses_calls and (CALL_TAG in text or re.search(begins, text)):
        return False
    return (stopped is not None or renderer.ended(ids)) and bool(said.strip() or len(ids) < 2)


def _fits(call: dict[str, Any], tools: list[dict[str, Any]], *, strict: bool = False) -> bool:
    offered = {tool.get("name"): tool for tool in (tool.get("function", tool) for tool in tools)}
    schema, given = offered.get(call["name"], {}).get("parameters") or {}, call["arguments"]
    known, needed = schema.get("properties") or {}, schema.get("required") or ()
    takes_all = schema.get("additionalProperties", not (known or strict))
    fits = isinstance(given, dict) and {*needed} <= {*given} and (takes_all or {*given} <= {*known})
    return call["name"] in offered and fits


class ToolDriver(Driver):
    """Driver of one factory's tool environments. Without a factory it plays tools or plain prompts.

    `run_on_main` runs a function on the main thread for tools that need it. `pool` and `probe` are None
    without an environment.
    """

    def __init__(
        self,
        pool: EnvironmentPool | None,
        name: str | None,
        probe: Any,
        standalone: list[Callable[..., Any]],
        parse: Parse,
        run_async: Callable[[Any], Any],
        run_on_main: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self._pool, self._name, self._parse = pool, name, parse
        self._run_async = run_async
        self._run_on_main = run_on_main
        self._main_only: set[str] = set()
        without = "tools" if standalone else None
        self.type_name = without if probe is None else type(probe).__name__
        self.trusted_text = trusts(*([] if probe is None else [probe]), *standalone)
        self._methods = [] if probe is None else tool_names(probe)
        self._scores = inspect.isfunction(getattr(type(probe), "get_reward", None))
        self._standalone = {tool.__name__: tool for tool in standalone}
        methods = [getattr(probe, name) for name in self._methods]
        self.tools = [*map(tool_schema, [*standalone, *methods])]

    def opening(self, episode: Episode, seed: int) -> Call | None:
        """Return the call that resets the environment with all columns of the row."""
        if self._pool is None:
            return None
        pool, columns = self._pool, episode.columns

        def opening() -> Outcome:
            env = pool.take(self._name, episode.instance)
            result = self._finished(env.reset(**columns))
            name = f"{self.type_name}.reset"
            text = self._read(name, check_opening(name, result))
            return Outcome(env, text, getattr(env, TURN_REWARDS, None) is not None)

        return opening

    def message(self, episode: Episode, ids: list[int]) -> Message:
        """Return the turn as a message with its tool calls, read by TRL's parser."""
        context = episode.context
        return self._parse(ids, context.prompt_ids + context.ids, self.tools)

    def turn(self, episode: Episode, message: Message) -> Call | None:
        """Return a function that executes the turn's tool calls, or None if the turn has none."""
        requests = message.get("tool_calls")
        if not (self.tools and requests):
            return None
        return functools.partial(self._carry_out, episode, requests)

    def scoring(self, episode: Episode) -> Call | None:
        """Return the call that gets the final reward, and the turn rewards appended since the last turn."""
        if episode.env is None or not (self._scores or episode.has_turn_rewards):
            return None

        def scoring() -> tuple[float | None, float | None]:
            reward = self._finished(episode.env.get_reward()) if self._scores else None
            name = f"{self.type_name}.get_reward()"
            final = None if reward is None else check_reward(reward, name)
            return final, self._new_turn_reward(episode)

        return scoring

    def _run_tool(self, name: str, call: Callable[[], Any]) -> Any:
        """Run a tool on the worker's thread, or on the main thread if the tool sets signal handlers.

        Such a tool is detected by its failure; its first call then runs twice.
        """
        if name not in self._main_only:
            try:
                return call()
            except ValueError as error:
                # This is Python's message.
                if "signal only works in main thread" not in str(error):
                    raise
                self._main_only.add(name)
        return self._run_on_main(call)

    def _carry_out(self, episode: Episode, requests: list[dict[str, Any]]) -> Outcome:
        """Run the synchronous calls in their order, then the asynchronous calls together."""
        env, failures, malformed = episode.env, 0, False
        isolated = isinstance(env, IsolatedEnvironment)
        tools = self._standalone | {
            # Use `call`, because `IsolatedEnvironment` hides tools such as `call` and `close`.
            name: functools.partial(env.call, name) if isolated else getattr(env, name)
            for name in self._methods
        }
        results: list[Message] = []
        waiting: list[tuple[str, Callable[[], Any]]] = []

        def answer(name: str, result: Any, error: BaseException | None = None) -> None:
            nonlocal failures
            called = f"The tool `{name}`"
            # Raise SystemExit and its like, which are no answers to the model.
            if isinstance(error, EnvironmentDied) or not isinstance(error, Exception | None):
                raise error
            if error is None and (is_picture(result) or has_image(result)):
                content = content_of(f"{called} returned", result, "text and image blocks")
                result = self._read(called, content)
            elif error is None:
                try:
                    result = result_text(called, result)
                except EnvironmentContractError as unreadable:
                    error = unreadable
            if error is not None:
                # The text of some errors, such as a TimeoutError, is empty.
                text = str(error) or type(error).__name__
                failures, result = failures + 1, str({"error": text})
            results.append({"role": "tool", "name": name, "content": result})

        for request in requests:
            name, arguments = request["function"]["name"], request["function"]["arguments"]
            if name not in tools:
                malformed = True
                answer(name, None, ValueError(f"Tool {name} not found."))
                continue
            tool, fits = tools[name], _fits(request["function"], self.tools, strict=True)
            malformed |= not fits
            call = functools.partial(lambda tool, given: tool(**given), tool, arguments)
            # Run a call that does not fit now, so that it fails with Python's own message.
            if fits and inspect.iscoroutinefunction(tool):
                waiting.append((name, call))
                continue
            try:
                result, error = self._run_tool(name, call), None
            except BaseException as raised:
                result, error = None, raised
            # A function that is not declared `async`, such as a decorator's, may return an awaitable.
            if inspect.isawaitable(result):
                waiting.append((name, functools.partial(lambda given: given, result)))
            else:
                answer(name, result, error)
        if waiting:
            answers = self._run_async(_together(call for _, call in waiting))
            for (name, _), (result, error) in zip(waiting, answers, strict=True):
                answer(name, result, error)
        return Outcome(
            messages=results,
            reward=self._new_turn_reward(episode),
            valid_action=not malformed,
            tool_calls=len(requests),
            tool_failures=failures,
        )

    def _new_turn_reward(self, episode: Episode) -> float | None:
        """Return the sum of the turn rewards appended since the last turn, or None without turn rewards."""
        rewards = getattr(episode.env, TURN_REWARDS, None)
        if rewards is None:
            return None
        name = f"{self.type_name}.{TURN_REWARDS}"
        if not isinstance(rewards, list):
            raise EnvironmentContractError(
                f"`{name}` is a {type(rewards).__name__}; must be a list that `reset` clears."
            )
        if len(rewards) < episode.turn_rewards_seen:
            raise EnvironmentContractError(f"`{name}` shrank to {len(rewards)} entries.")
        new = rewards[episode.turn_rewards_seen :]
        episode.turn_rewards_seen = len(rewards)
        return sum(check_reward(reward, f"{name}[-1]") for reward in new)


async def _together(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Run asynchronous calls together. An exception affects only its own call."""
    return await asyncio.gather(*map(caught, calls))
