"""MCP's tools as a client sees them, with a stand-in for the package; `tests/agents` has a real server."""

import asyncio
import base64
import contextlib
import io
import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest

from tests.kit.rollout_kit import play_once, says
from tests.kit.vision import picture
from trl_stppo.envs.adapters import McpEnv
from trl_stppo.envs.base import tool_names, tool_schema


def tool(name, *arguments, **schema):
    properties = {argument: {"type": "string"} for argument in arguments}
    full = {"type": "object", "properties": properties, "required": [*arguments], **schema}
    return SimpleNamespace(name=name, description=None, input_schema=full)


class Session:
    """Answers calls with their arguments. `pages`: cursor -> (tools, next cursor)."""

    pages: ClassVar = {}

    def __init__(self, *streams):
        pass

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        return None

    async def initialize(self):
        return None

    async def list_tools(self, params=None):
        tools, cursor = self.pages[params and params.cursor]
        return SimpleNamespace(tools=tools, next_cursor=cursor)

    async def call_tool(self, name, arguments):
        await asyncio.sleep(0)
        block = SimpleNamespace(type="text", text=f"{name} {arguments}")
        return SimpleNamespace(content=[block], is_error=False)


@pytest.fixture
def pages(monkeypatch):
    @contextlib.asynccontextmanager
    async def client(*args):
        yield ()

    package, types = ModuleType("mcp"), ModuleType("mcp.types")
    package.ClientSession, package.stdio_client = Session, client
    package.StdioServerParameters = types.PaginatedRequestParams = SimpleNamespace
    monkeypatch.setitem(sys.modules, "mcp", package)
    monkeypatch.setitem(sys.modules, "mcp.types", types)
    monkeypatch.setattr(Session, "pages", {})
    return Session.pages


def test_an_image_of_a_server_is_a_block(pages, monkeypatch):
    file = io.BytesIO()
    picture(1).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()

    async def answers(self, name, arguments):
        text = SimpleNamespace(type="text", text="seen")
        image = SimpleNamespace(type="image", data=arguments.get("data", data))
        return SimpleNamespace(content=[text, image], is_error="data" in arguments)

    monkeypatch.setattr(Session, "call_tool", answers)
    pages[None] = [tool("look")], None
    env = McpEnv("server")
    text, image = asyncio.run(env.look())
    assert text == {"type": "text", "text": "seen"}
    assert image["image"].tobytes() == picture(1).tobytes()
    with pytest.raises(RuntimeError, match=r"^seen$"):
        asyncio.run(env.look(data=data))
    with pytest.raises(ValueError, match="base64"):
        asyncio.run(env.look(data="no image"))
    env.close()


def test_all_pages_are_read(pages):
    pages[None] = [tool("a")], "1"
    pages["1"] = [tool("b")], "2"
    pages["2"] = [tool("c")], None
    env = McpEnv("server")
    assert tool_names(env) == [*"abc"]
    env.close()


NAMES = ("from", "date-min", "_env", "self", "method")


def test_names_that_are_not_pythons_are_arguments(pages):
    pages[None] = [tool("find", *NAMES)], None
    env = McpEnv("server")
    given = dict.fromkeys(NAMES, "x")
    assert [*tool_schema(env.find)["function"]["parameters"]["properties"]] == [*NAMES]
    assert asyncio.run(env.find(**given)) == f"find {given}"
    env.close()


@pytest.mark.parametrize(("given", "valid"), [
    ({"from": "x"}, True), ({}, False), ({"form": "x"}, False), ("x", False),
])  # fmt: skip
def test_a_call_is_valid_if_it_fits_the_servers_schema(pages, given, valid):
    pages[None] = [tool("find", "from")], None

    def parse(turn, before, tools):
        message = {"role": "assistant", "content": "x"}
        calls = [{"type": "function", "function": {"name": "find", "arguments": given}}]
        return message if len(before) > 9 else {**message, "tool_calls": calls}

    episode = play_once(lambda: McpEnv("server"), says(["!x]", "end]"]), parse=parse).only
    assert episode.valid_actions[0] is valid
    assert episode.messages[1]["content"].startswith("{'error'" if given == "x" else "find ")


@pytest.mark.parametrize("name", ["reset", "_look"])
def test_a_tool_with_the_name_of_a_method_is_refused(pages, name):
    pages[None] = [tool(name)], None
    with pytest.raises(ValueError, match=name):
        McpEnv("server")


def test_a_schema_without_arguments_is_whole(pages):
    pages[None] = [SimpleNamespace(name="now", description="Time.", input_schema={})], None
    env = McpEnv("server")
    assert tool_schema(env.now)["function"] == {
        "name": "now", "description": "Time.", "parameters": {"type": "object", "properties": {}},
    }  # fmt: skip
    env.close()
