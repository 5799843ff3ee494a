"""Play an agent with scripted answers in place of a model."""

import asyncio
import inspect
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from ..errors import EnvironmentContractError
from ..rollout.agent_driver import ADDRESS, episode_over, outcome_of
from ..rollout.loop import described
from ..rollout.openai_wire import Answers, answer_message, completion, make_clients
from .usage import parsed_json

# An episode may take this long.
SECONDS = 120.0


def is_agent(named: Any) -> bool:
    """Return whether an object is an agent function `(client, row)` and not an environment factory."""
    if isinstance(named, type):
        return False
    first = [*inspect.signature(named).parameters.values()][:2]
    return len(first) == 2 and all(p.kind <= 1 and p.default is p.empty for p in first)


def play_agent(agent: Any, row: Any, actions: Sequence[str], steps: int) -> tuple[str, list[str]]:
    """Play one episode of an agent; return a line with its calls and result, and a list of warnings."""
    ended, found, calls, tools = Future[Any](), list[str](), list[str](), dict[str, None]()

    def answer(request: Any, body: Any) -> Future[Any]:
        word, answered = actions[len(calls) % len(actions)], Future[Any]()
        offered = {tool["function"]["name"]: None for tool in request.tools}
        tools.update(offered)
        name, _, rest = word.strip().partition(" ")
        message: dict[str, Any] = {"content": word}
        if name in offered:
            function = {"name": name, "arguments": parsed_json(rest or "{}", "action")}
            message = {"tool_calls": [{"function": function}]}
        calls.append(f"chatcmpl-{len(calls)}")
        message = answer_message(message, calls[-1], stopped=None)
        whole = 200, completion(calls[-1], message, "stop", 0, None, 0)
        if len(calls) < steps + 2:
            answered.set_result(whole if len(calls) <= steps else episode_over().response)
        elif not ended.done():
            # This call stays open.
            ended.set_exception(RuntimeError(f"it calls again after its end, of {steps} calls"))
        return answered

    def run() -> None:
        try:
            clients = make_clients(Answers(answer, found.extend), ADDRESS, "key")
            is_async = inspect.iscoroutinefunction(agent)
            result = asyncio.run(agent(clients[0], row)) if is_async else agent(clients[1], row)
            session = SimpleNamespace(names={name: n for n, name in enumerate(calls)}, over=None)
            outcome_of(SimpleNamespace(env=session, num_turns=len(calls)), result)
            ended.set_result(result)
        except BaseException as error:
            if len(calls) <= steps:
                ended.set_exception(error)
            elif not ended.done():
                ended.set_result(None)

    # The agent may hang.
    threading.Thread(target=run, daemon=True).start()
    try:
        result = ended.result(SECONDS)
    except BaseException as error:
        what = described(error) if ended.done() else f"it takes longer than {SECONDS:g} s"
        raise EnvironmentContractError(f"The agent: {what}") from error
    found = [f"`{name}` has no effect in a training." for name in found]
    found += ["It makes no call."] * (not calls) + ["It returns no reward."] * (result is None)
    names = ", ".join(tools) or "(none)"
    return f"calls {len(calls)}, tools {names}, returns {result!r:.200}", found
