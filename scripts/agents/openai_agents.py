"""Trains an agent of the OpenAI Agents SDK, its own classes, on sums with a tool.

Needs: pip install openai-agents.

Examples:
python scripts/agents/openai_agents.py                             # a tiny taught model, on a CPU
python scripts/agents/openai_agents.py --model Qwen/Qwen3-0.6B     # any model whose template has tools
"""

from __future__ import annotations

from typing import Any

from taught import MAX_TURNS, train

import agents

SYSTEM = "Use the tool add."


@agents.function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def adder(client: Any, row: dict[str, Any]) -> float:
    """Answer the row's question; the reward is 1 if the answer has the sum."""
    model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
    agent = agents.Agent(name="adder", instructions=SYSTEM, tools=[add], model=model)
    try:
        result = await agents.Runner.run(agent, row["prompt"][-1]["content"], max_turns=MAX_TURNS)
    except (agents.MaxTurnsExceeded, agents.ModelBehaviorError):  # such as an unknown tool
        return 0.0
    return float(row["answer"] in str(result.final_output))


if __name__ == "__main__":
    agents.set_tracing_disabled(True)
    train(adder, SYSTEM, __doc__.splitlines()[0], "runs/openai-agents")
