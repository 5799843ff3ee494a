"""Trains an agent of LangGraph, its own classes, on sums with a tool.

Needs: pip install langgraph langchain-openai.

Examples:
python scripts/agents/langgraph_agent.py                           # a tiny taught model, on a CPU
python scripts/agents/langgraph_agent.py --model Qwen/Qwen3-0.6B   # any model whose template has tools
"""

from __future__ import annotations

from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from taught import train

SYSTEM = "Use the tool add."


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def adder(client: Any, row: dict[str, Any]) -> float:
    """Answer the row's question; the reward is 1 if the answer has the sum."""
    model = ChatOpenAI(
        model="policy", api_key=client.api_key, base_url=str(client.base_url),
        http_async_client=client.http_client,
    ).bind_tools([add])  # fmt: skip

    async def answer(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_node("tools", ToolNode([add]))
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", tools_condition)
    graph.add_edge("tools", "answer")
    messages = [("system", SYSTEM), ("user", row["prompt"][-1]["content"])]
    state = await graph.compile().ainvoke({"messages": messages})
    return float(row["answer"] in str(state["messages"][-1].content))


if __name__ == "__main__":
    train(adder, SYSTEM, __doc__.splitlines()[0], "runs/langgraph")
