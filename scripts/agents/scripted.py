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

from trl_stppo.rollout.openai_wire import completion, http, read_message


def scripted(
    reply: Callable[[dict[str, Any]], dict[str, Any]], rows: list[dict[str, Any]]
) -> openai.AsyncOpenAI:
    """Return the client; each call appends a row of TRL's SFTTrainer to `rows`."""

    def respond(sent: httpx2.Request) -> httpx2.Response:
        request, names = json.loads(sent.content), dict[str, str]()
        message = {"role": "assistant", **reply(request)}
        *prompt, said = [read_message(m, names) for m in [*request["messages"], message]]
        rows.append({"prompt": prompt, "completion": [said], "tools": request.get("tools")})
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        body = completion("0", message, finish, 0, 0)
        status, kind, content = http((200, body), sent.content)
        return httpx2.Response(status, headers={"content-type": kind}, content=content)

    client = httpx2.AsyncClient(transport=httpx2.MockTransport(respond))
    return openai.AsyncOpenAI(api_key="-", base_url="http://scripted", http_client=client)
