"""An MCP server over stdio with a few tools."""

from typing import Literal

from mcp.server.mcpserver import MCPServer
from pydantic import BaseModel

server = MCPServer("numbers")
calls: list[int] = []


class Point(BaseModel):
    x: int
    y: int


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    calls.append(a)
    if a == 13:
        raise ValueError("13 is unlucky")
    return a + b


@server.tool()
def count() -> int:
    """Count the calls of add."""
    return len(calls)


@server.tool(name="far-away")
def far(point: Point, unit: Literal["m", "km"], tags: list[str] | None = None) -> str:
    """Measure."""
    return f"{point.x**2 + point.y**2} {unit} {tags}"


if __name__ == "__main__":
    server.run("stdio")
