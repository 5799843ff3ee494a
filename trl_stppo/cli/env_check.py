"""Test an environment for errors and common mistakes.

Makes the environment, plays a few rows, and reports broken rules of the
contract (errors) and usual mistakes (warnings), such as rewards that are not
numbers or state that two instances share (docs/environments.md). An agent,
`(client, row)`, gets the actions in place of the policy's turns. Without
--rows and --row it plays the rows of the class, or one made-up row.

Examples:
    trl-stppo env check my_env:MyEnv --rows rows.jsonl
    trl-stppo env check my_env:MyEnv --action 'go left' --strict
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import re
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..envs.base import Row, described, is_text_environment
from ..envs.check import DEFAULT_ACTIONS, MAX_ROWS, check_env
from ..errors import EnvironmentContractError
from ..rollout.agent_driver import ADDRESS, EPISODE_OVER, AgentSession, outcome_of
from ..rollout.chat import ChatRenderer, Message
from ..rollout.contexts import AgentRequest
from ..rollout.environments import close_environment
from ..rollout.openai_wire import answer_message, completion
from ..rollout.record import StopReason
from ..rollout.workers import CallResult, EnvironmentCalls
from .objects import named_factory, rows_for
from .play import tool_call

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Longest time of an agent's episode.
SECONDS = 120.0
NO_CALL = "It makes no call."
# A turn that looks like a tool's name with arguments.
CALL = re.compile(r"\w+ \{.*\}", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `env check` to the parser."""
    add = parser.add_argument
    add("environment", metavar="MODULE:CLASS", help="An environment, its factory, or an agent.")
    add("--rows", metavar="FILE", help="Rows to play, one JSON object per line (.jsonl).")
    add("--row", metavar="JSON", help="One row.")
    add("--arguments", metavar="JSON", help="Arguments of the class.")
    add("--action", metavar="TEXT", action="append", help="A turn to play; repeat it for several.")
    add("--steps", metavar="N", type=int, default=20, help="Most turns of an episode.")
    add("--model", metavar="NAME", help="A model whose chat template must render the tools.")
    add("--strict", action="store_true", help="Warnings fail too.")


def run(options: argparse.Namespace) -> int:
    """Check the environment and print warnings; return 1 for warnings with --strict, else 0."""
    factory = named_factory(options.environment, options.arguments)
    rows = rows_for(options.environment, options.rows, options.row)
    actions, found = list[Any](options.action or []), list[str]()
    if is_agent(factory):
        made_up = {"prompt": [{"role": "user", "content": "hello"}], "seed": 0}
        print(f"{options.environment}: agent")
        played = (rows or [made_up])[:MAX_ROWS]
        silent = 0
        tokenizer = options.model and fitted(options.model, agent=factory)
        for row in played:
            requests = list[AgentRequest]()
            line, warned = play_agent(
                factory, row, actions or DEFAULT_ACTIONS, options.steps, requests.append
            )
            print(line)
            if tokenizer:
                render(tokenizer, row, requests)
            silent += NO_CALL in warned
            found += [message for message in warned if message not in found]
        if silent == len(played):
            raise EnvironmentContractError(
                "The agent: it makes no call that can be answered. Does it catch an error of its client?"
            )
    else:
        is_text = True
        # Ignore an error of the factory here, because `check_env` reports it.
        with contextlib.suppress(Exception):
            probe = factory()
            is_text = is_text_environment(probe)
            close_environment(probe, asyncio.run)
        if not is_text:
            actions = [tool_call(word) for word in actions]
            if not actions:
                print("No tool is called: name calls with `--action 'name {\"argument\": ...}'`.")
            if options.model:
                fitted(options.model, tools={None: factory}, probes={None: probe})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = check_env(factory, rows, actions=actions or None, steps=options.steps)
        print(f"{options.environment}: played {min(len(rows or [{}]), MAX_ROWS)} rows")
    for message in found:
        print(f"warning: {message}")
    print(f"OK, {len(found)} warning{'' if len(found) == 1 else 's'}")
    return int(bool(found) and options.strict)


def fitted(model: str, **sources: Any) -> PreTrainedTokenizerBase:
    """Return a model's tokenizer; raise if its chat template does not render an environment's tools."""
    from ..hub.loading import load_tokenizer
    from ..trainer.planning.plan import RolloutPlan, fitted_tokenizer

    return fitted_tokenizer(load_tokenizer(model), RolloutPlan(**sources))


def render(
    tokenizer: PreTrainedTokenizerBase,
    row: Row,
    requests: Sequence[AgentRequest],
    **options: object,
) -> None:
    """Render an agent's calls; `options` are arguments of the chat template."""
    reader = ChatRenderer(tokenizer, [], template_kwargs=options).for_row(row)
    for each in requests:
        try:
            reader.prompt_ids(each.messages, each.tools)
        except Exception as error:
            message = f"The chat template does not render a call: {described(error)}"
            raise EnvironmentContractError(message) from error


def is_agent(named: Any) -> bool:
    """Return whether an object is an agent function `(client, row)` and not an environment factory."""
    if isinstance(named, type):
        return False
    for count in (0, 2):
        # A built-in function without a signature raises ValueError.
        with contextlib.suppress(TypeError, ValueError):
            inspect.signature(named).bind(*[None] * count)
            return count == 2
    return False


def play_agent(
    agent: Any,
    row: Row,
    actions: Sequence[str],
    steps: int,
    heard: Callable[[AgentRequest], object] = lambda request: None,
) -> tuple[str, list[str]]:
    """Play one episode of an agent; return a line with its calls and result, and a list of warnings.

    `heard` gets each call.
    """
    calls, found = EnvironmentCalls(), list[str]()
    tools, unknown = dict[str, None](), dict[str, None]()
    # Nothing reads the contexts here, because no turn is sampled.
    contexts: Any = None
    session: Any = AgentSession(agent, row, ADDRESS, contexts, found.extend)

    async def playing() -> object:
        event = await session.start()
        while isinstance(event, AgentRequest):
            heard(event)
            word, number = actions[session.turns % len(actions)], session.turns + 1
            session.turns, session.names[f"chatcmpl-{number}"] = number, session.turns
            if number > steps + 1:
                raise RuntimeError(f"it calls again after its end, of {steps} calls")
            offered = {tool["function"]["name"]: None for tool in event.tools}
            tools.update(offered)
            message: Message = {"content": word}
            if word.split()[:1] and word.split()[0] in offered:
                name, arguments = tool_call(word)
                call = {"function": {"name": name, "arguments": arguments}}
                message = {"tool_calls": [call]}
            elif CALL.fullmatch(word):
                unknown[word] = None
            message = answer_message(message, f"chatcmpl-{number}", stopped=None)
            whole = 200, completion(f"chatcmpl-{number}", message, "stop", 0, 0)
            if number > steps:
                session.over = StopReason.TOKEN_BUDGET
            session.pending.answer.set_result(whole if session.over is None else EPISODE_OVER.response)
            event = await session.next()
        outcome_of(SimpleNamespace(env=session, num_turns=session.turns), event)
        return event

    calls.submit(0, playing, SECONDS)
    played: list[CallResult] = []
    while not played:
        played = calls.poll(SECONDS)
    session.close()
    calls.close()
    if played[0].timed_out or played[0].error is not None:
        late = f"it takes longer than {SECONDS:g} s"
        what = late if played[0].error is None else described(played[0].error)
        raise EnvironmentContractError(f"The agent: {what}") from played[0].error
    result = played[0].value
    found = [f"`{name}` has no effect in a training." for name in dict.fromkeys(found)]
    found += [f"`{word}` calls no tool of the request, so it was an answer." for word in unknown]
    found += [NO_CALL] * (not session.turns)
    rewards = result if isinstance(result, dict) else {"reward": result}
    unset = rewards.get("reward") is None and rewards.get("turn_rewards") is None
    # An agent that does not catch the error after its last call gets a reward of 0.
    unset = unset and session.over is None
    found += ["It returns no reward."] * unset
    names = f", tools {', '.join(tools)}" if tools else ""
    return f"calls {session.turns}{names}, returns {result!r:.200}", found
