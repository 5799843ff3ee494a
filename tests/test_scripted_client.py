"""The client that records an agent's demonstrations gives rows that a chat template takes."""

import asyncio
import json

from scripts.agents.scripted import scripted

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"id": "0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def reply(request):
    answers = [{"content": None, "tool_calls": [CALL]}, {"content": "3"}]
    return answers[len(request["messages"]) > 1]


async def agent(client):
    messages = [{"role": "user", "content": "1 + 2?"}]
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls or []:
            assert json.loads(call.function.arguments) == {"a": 1}
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
    return said.content


def test_a_scripted_client_streams_if_the_agent_asks_for_a_stream():
    async def streamed():
        messages = [{"role": "user", "content": "1 + 2?"}]
        client = scripted(reply, [])
        stream = await client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS, stream=True
        )
        return [chunk.choices[0] async for chunk in stream]

    parts = asyncio.run(streamed())
    calls = [call for part in parts for call in part.delta.tool_calls or []]
    assert [call.function.name for call in calls] == ["add"]
    assert parts[-1].finish_reason == "tool_calls"


def test_a_scripted_client_answers_and_records_what_a_template_reads():
    rows = []
    assert asyncio.run(agent(scripted(reply, rows))) == "3"
    called = {"name": "add", "arguments": {"a": 1}}
    asked, answered = rows
    assert [row["tools"] for row in rows] == [TOOLS] * 2
    assert asked["prompt"] == [{"role": "user", "content": "1 + 2?"}]
    assert asked["completion"] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": called}],
        }
    ]
    assert answered["prompt"][1] == asked["completion"][0]
    assert answered["prompt"][2]["content"] == "3"
    assert answered["completion"] == [{"role": "assistant", "content": "3"}]
