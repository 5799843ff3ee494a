"""An OpenAI client that answers by a script and records its calls: demonstrations for an agent's warm start.

    rows = []
    client = scripted(reply, rows)  # reply(request) -> the assistant's message in OpenAI's form
    asyncio.run(my_agent(client, row))  # for every row
    SFTTrainer(..., train_dataset=Dataset.from_list(rows)).train()

The model's chat template must write tools, if the agent has some.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2
import openai


def scripted(
    reply: Callable[[dict[str, Any]], dict[str, Any]], rows: list[dict[str, Any]]
) -> openai.AsyncOpenAI:
    """Return the client; each call appends a row of TRL's SFTTrainer to `rows`."""

    def respond(sent: httpx2.Request) -> httpx2.Response:
        request = json.loads(sent.content)
        message = {"role": "assistant", **reply(request)}
        prompt = [as_template_reads(said) for said in request["messages"]]
        completion = [as_template_reads(message)]
        rows.append({"prompt": prompt, "completion": completion, "tools": request.get("tools")})
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        head = {"id": "0", "object": "chat.completion", "created": 0, "model": "policy"}
        return httpx2.Response(200, json={**head, "choices": [choice]})

    client = httpx2.AsyncClient(transport=httpx2.MockTransport(respond))
    return openai.AsyncOpenAI(api_key="-", base_url="http://scripted", http_client=client)


def as_template_reads(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of OpenAI's form for a chat template: arguments are an object, content is text."""
    read = {**message, "content": message.get("content") or ""}
    calls = [call["function"] for call in message.get("tool_calls") or []]
    if calls:
        read["tool_calls"] = [
            {"type": "function", "function": {**call, "arguments": json.loads(call["arguments"])}}
            for call in calls
        ]
    return read
