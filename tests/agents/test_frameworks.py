"""Agents of public frameworks, none of their classes changed, in a training: `make test-agents`."""

import asyncio
import copy
import inspect
import json
from collections import defaultdict
from typing import Any

import pytest
import torch
from datasets import Dataset

from tests.kit.builders import Kept, build
from trl_stppo.generation import cached
from trl_stppo.rollout.openai_wire import Answers, answer_message, completion, make_clients

pytestmark = pytest.mark.agents

QUESTION = "what is 2 and 3"
ROWS = Dataset.from_dict({"prompt": [[{"role": "user", "content": QUESTION}]] * 4})
executed: list[tuple[int, int]] = []


def added(a: int, b: int) -> int:
    executed.append((a, b))
    return a + b


def right(answer: Any) -> float:
    return float("5" in str(answer))


def openai_agent(client: Any) -> Any:
    import agents

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return added(a, b)

    model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
    return agents.Agent(name="adder", instructions="be brief", tools=[add], model=model)


async def sdk(client: Any, row: dict[str, Any]) -> float:
    from agents import Runner

    result = await Runner.run(openai_agent(client), row["prompt"][0]["content"])
    return right(result.final_output)


async def sdk_streamed(client: Any, row: dict[str, Any]) -> float:
    from agents import Runner

    result = Runner.run_streamed(openai_agent(client), row["prompt"][0]["content"])
    kinds = {event.type async for event in result.stream_events()}
    assert "raw_response_event" in kinds
    return right(result.final_output)


async def graph(client: Any, row: dict[str, Any]) -> float:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return added(a, b)

    where = {"base_url": str(client.base_url), "http_async_client": client.http_client}
    model = ChatOpenAI(model="policy", api_key=client.api_key, **where).bind_tools([add])

    async def answer(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    made = StateGraph(MessagesState)
    made.add_node("answer", answer)
    made.add_node("tools", ToolNode([add]))
    made.add_edge(START, "answer")
    made.add_conditional_edges("answer", tools_condition)
    made.add_edge("tools", "answer")
    messages = [("system", "be brief"), ("user", row["prompt"][0]["content"])]
    state = await made.compile().ainvoke({"messages": messages})
    return right(state["messages"][-1].content)


def smolagent(kind: str, client: Any, row: dict[str, Any]) -> float:
    import smolagents

    @smolagents.tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return added(a, b)

    model = smolagents.OpenAIModel(
        "policy", api_base=str(client.base_url), api_key=client.api_key,
        client_kwargs={"http_client": client.http_client},
    )  # fmt: skip
    agent = getattr(smolagents, kind)([add], model, max_steps=3, verbosity_level=0)
    return right(agent.run(row["prompt"][0]["content"]))


def tool_calling(client: Any, row: dict[str, Any]) -> float:
    return smolagent("ToolCallingAgent", client, row)


def code(client: Any, row: dict[str, Any]) -> float:
    return smolagent("CodeAgent", client, row)


def calling(name: str, **arguments: Any) -> dict[str, Any]:
    """A turn that calls a tool."""
    return {"tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


ADDS, SUM = calling("add", a=2, b=3), {"content": "the sum is 5"}
CODE = "Thought: I add.\n<code>\nfinal_answer(add(2, 3))\n</code>"
# agent -> package, and the turns that the policy is taught
CASES: dict[Any, tuple[str, list[dict[str, Any]]]] = {
    sdk: ("agents.tool", [ADDS, SUM]),
    sdk_streamed: ("agents.tool", [ADDS, SUM]),
    graph: ("langgraph", [ADDS, SUM]),
    tool_calling: ("smolagents", [ADDS, calling("final_answer", answer="5")]),
    code: ("smolagents", [{"content": CODE}]),
}


def recorded(agent: Any, turns: list[dict[str, Any]]) -> list[Any]:
    """The calls that an agent makes if it gets these turns, for `taught`."""
    from taught import tool_call

    calls, left = list[Any](), iter(turns)

    def ask(request: Any) -> None:
        turn = next(left)
        text = turn.get("content", "")
        for call in turn.get("tool_calls", ()):
            text += tool_call(call["function"]["name"], json.dumps(call["function"]["arguments"]))
        calls.append((request.messages, request.tools, text))
        message = answer_message(turn, "0-0", stopped=None)
        request.answer.set_result((200, completion("x", message, "stop", 0, 0)))

    clients = make_clients(Answers(ask, lambda names: None), "http://policy.invalid/v1", "key")
    if inspect.iscoroutinefunction(agent):
        assert asyncio.run(agent(clients[0], ROWS[0])) == 1.0
    else:
        assert agent(clients[1], ROWS[0]) == 1.0
    return calls


def watched(agent: Any, exchanges: list[list[Any]]) -> Any:
    """The agent, whose bytes are recorded where its client sends and gets them."""

    def watch(client: Any) -> list[Any]:
        exchanges.append([])
        return exchanges[-1]

    async def asynchronous(client: Any, row: dict[str, Any]) -> Any:
        mine = watch(client)

        async def sent(request: Any) -> None:
            mine.append([json.loads(request.content), None])

        async def got(response: Any) -> None:
            mine[-1][1] = (await response.aread()).decode()

        client.http_client.event_hooks = {"request": [sent], "response": [got]}
        return await agent(client, row)

    def plain(client: Any, row: dict[str, Any]) -> Any:
        mine = watch(client)
        client.http_client.event_hooks = {
            "request": [lambda request: mine.append([json.loads(request.content), None])],
            "response": [lambda response: mine[-1].__setitem__(1, response.read().decode())],
        }
        return agent(client, row)

    return asynchronous if inspect.iscoroutinefunction(agent) else plain


def rendered(tokenizer: Any, body: dict[str, Any]) -> list[int]:
    """The prompt of a request as sent, by the chat template alone."""
    messages = []
    for message in copy.deepcopy(body["messages"]):
        if isinstance(message.get("content"), list):
            message["content"] = "".join(part["text"] for part in message["content"])
        message["content"] = message.get("content") or ""
        for call in message.get("tool_calls") or ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        messages.append(message)
    tools = body.get("tools")
    return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)


def prompts_of(episode: Any) -> list[tuple[bool, list[int]]]:
    """Per turn: whether it is the first of its context, and the row that was read."""
    found = {
        turn: (number == 0, context.prompt_ids + context.ids[:start])
        for context in episode.contexts
        for number, (turn, (start, _)) in enumerate(zip(context.turns, context.turn_spans, strict=True))
    }
    return [found[turn] for turn in sorted(found)]


@pytest.fixture(scope="module")
def models() -> dict[Any, Any]:
    """Taught models by agent."""
    return {}


@pytest.mark.parametrize("agent", list(CASES), ids=lambda agent: agent.__name__)
def test_an_unchanged_agent_trains_on_what_it_sent_and_got(
    agent: Any, models: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    package, turns = CASES[agent]
    pytest.importorskip(package)
    from taught import taught

    if agent not in models:
        models[agent] = taught(recorded(agent, turns))
    model, tokenizer = map(copy.deepcopy, models[agent])
    assert sum(parameter.numel() for parameter in model.parameters()) <= 1_000_000
    before = [parameter.detach().clone() for parameter in model.parameters()]
    sampled, exchanges = defaultdict[int, list[Any]](list), list[list[Any]]()
    make = cached.TurnResult

    def result(key: int, ids: list[int], *rest: Any, **named: Any) -> Any:
        sampled[key].append(list(ids))
        return make(key, ids, *rest, **named)

    monkeypatch.setattr(cached, "TurnResult", result)
    arguments = {
        "agent": watched(agent, exchanges), "train_dataset": ROWS, "model": model,
        "processing_class": tokenizer, "reward_funcs": None,
    }  # fmt: skip
    trainer = build(
        tmp_path, Kept, arguments=arguments, max_steps=3, num_mini_batches=1,
        gradient_accumulation_steps=1, max_turns=6, max_turn_tokens=60, max_completion_length=900,
        learning_rate=1e-4, temperature=0.7,
    )  # fmt: skip
    executed.clear()
    trainer.train()
    assert len(trainer.rollouts) == 3
    assert (2, 3) in executed
    pairs = zip(before, trainer.model.parameters(), strict=True)
    assert not all(torch.equal(one, other) for one, other in pairs)
    played = [rollout.episodes for rollout in trainer.rollouts]
    assert sum(e.turn_rewards[-1] for episodes in played for e in episodes) >= 6, "as taught"
    for number, episodes in enumerate(played):
        sent = {row_of(of): of for of in exchanges[4 * number : 4 * number + 4]}
        assert sorted(sent) == [episode.row for episode in episodes] == [0, 1, 2, 3]
        for episode in episodes:
            assert episode.error is None
            check_prompts(tokenizer, episode, [body for body, _ in sent[episode.row]])
    for row in range(4):
        kept = [turn for episodes in played for turn in episodes[row].turns_of_tokens()]
        for turn, whole in zip(kept, sampled[row][-len(kept) :], strict=True):
            # A stop string ends the turn, `</code>` of the code agent.
            assert turn == (whole[: len(turn)] if agent is code else whole)
            assert "</code>" in tokenizer.decode(turn) or turn == whole


def row_of(exchanged: list[Any]) -> int:
    """The row of an episode, which is in the id of its completions."""
    body = exchanged[0][1].removeprefix("data: ").partition("\n")[0]
    return int(json.loads(body)["id"].split("-")[1])


def check_prompts(tokenizer: Any, episode: Any, bodies: list[Any]) -> None:
    """Every call was sampled from what the framework sent."""
    for body, (is_first, row) in zip(bodies, prompts_of(episode), strict=True):
        whole = rendered(tokenizer, body)
        if is_first:
            assert row == whole
        assert tokenizer.decode(row) == tokenizer.decode(whole)
