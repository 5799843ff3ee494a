"""Adapter of a local MCP server: its tools form a tool environment."""

import asyncio
import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from ...errors import MissingPackageError
from ..base import decoded_image

# Longest time in seconds for a server to start, and to end.
WAIT_SECONDS = 60.0
TAKEN = ("reset", "step", "close", "get_reward")


class McpEnv:
    """A tool environment that starts an MCP server (`command`, `args`, `env`) and offers its tools.

    Each instance has a server process of its own, which `close` ends. A tool's error becomes its answer. A
    subclass may define `reset`, which returns a text or None, and `get_reward`.
    """

    def __init__(self, command: str, args: Sequence[str] = (), env: Mapping[str, str] | None = None) -> None:
        server = _Server(command, list(args), None if env is None else dict(env))
        # A finalizer also runs when the environment is deleted. A public method would be a tool.
        self.close = weakref.finalize(self, server.end)
        if wrong := [t.name for t in server.tools if t.name in TAKEN or t.name.startswith("_")]:
            self.close()
            raise ValueError(f"The server has a tool {wrong[0]!r}; not allowed: {TAKEN}, _*.")
        methods = {tool.name: _method(tool, server) for tool in server.tools}
        if len(methods) < len(server.tools):
            self.close()
            raise ValueError(f"The server has two tools of one name: {[t.name for t in server.tools]}.")
        self.__class__ = type(type(self).__name__, (type(self),), methods)

    def reset(self, **row: object) -> str | None:
        """Start an episode. The server is not restarted, so its state remains."""
        return None


class _Server:
    """An MCP server's process and its client, on an event loop in a separate thread."""

    def __init__(self, *command: Any) -> None:
        self._begun = Future[tuple[Any, Any, Any]]()
        serve = lambda: asyncio.run(self._serve(*command))  # noqa: E731
        self._thread = threading.Thread(target=serve, name="mcp", daemon=True)
        self._thread.start()
        self._loop, self._over, self._session = self._begun.result(WAIT_SECONDS)

    async def _serve(self, command: str, args: list[str], env: dict[str, str] | None) -> None:
        try:
            from mcp import ClientSession, StdioServerParameters, stdio_client
            from mcp.types import PaginatedRequestParams

            over = asyncio.Event()
            parameters = StdioServerParameters(command=command, args=args, env=env)
            async with (
                stdio_client(parameters, sys.__stderr__) as streams,
                ClientSession(*streams) as session,
            ):
                await session.initialize()
                page = await session.list_tools()
                self.tools = page.tools
                while page.next_cursor is not None:
                    page = await session.list_tools(params=PaginatedRequestParams(cursor=page.next_cursor))
                    self.tools += page.tools
                self._begun.set_result((asyncio.get_running_loop(), over, session))
                await over.wait()
        except ImportError:
            self._begun.set_exception(MissingPackageError("mcp"))
        except BaseException as error:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            if not self._begun.done():
                text = f"The MCP server `{command}` did not start: {type(error).__name__}: {error}"
                self._begun.set_exception(ConnectionError(text))

    async def call(self, name: str, arguments: dict[str, object]) -> Any:
        """Call a tool of the server. Cancelling the caller cancels the call.

        Return its text, or a list of text and image blocks if the server sends an image.
        """
        called = self._session.call_tool(name, arguments)
        future = asyncio.run_coroutine_threadsafe(called, self._loop)
        result = await asyncio.wrap_future(future)
        blocks = [_block(part) for part in result.content]
        texts = [block["text"] for block in blocks if "text" in block]
        if result.is_error:
            raise RuntimeError("\n".join(texts))
        return "\n".join(texts) if len(texts) == len(blocks) else blocks

    def end(self) -> None:
        """End the server's process."""
        # Ignore the error if the loop has ended, or if this is its thread, which cannot join itself.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(WAIT_SECONDS)


def _block(part: Any) -> dict[str, Any]:
    """Return a part of a result as a text or image block."""
    if part.type == "image":
        return {"type": "image", "image": decoded_image(part.data)}
    return {"type": "text", "text": part.text if part.type == "text" else part.model_dump_json()}


def _method(tool: Any, server: _Server) -> Callable[..., object]:
    """Return a method that calls an MCP tool. The server's schema may have names that Python forbids."""

    async def method(_env: object, /, **arguments: object) -> Any:
        return await server.call(tool.name, arguments)

    method.__name__ = method.__qualname__ = tool.name
    method.__doc__ = tool.description or tool.name
    schema = {"type": "object", "properties": {}, **tool.input_schema}
    function = {"name": tool.name, "description": method.__doc__, "parameters": schema}
    method.json_schema = {"type": "function", "function": function}  # type: ignore[attr-defined]
    return method
