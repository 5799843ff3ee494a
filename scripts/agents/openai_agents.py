"""Trains an agent of the OpenAI Agents SDK, its own classes, on sums with a tool.

Needs: pip install openai-agents.

Examples:
python scripts/agents/openai_agents.py                             # a tiny taught model, on a CPU
python scripts/agents/openai_agents.py --model Qwen/Qwen3-0.6B     # any model whose template has tools
"""

from __future__ import annotations

import argparse
from typing import Any

from datasets import Dataset
from taught import sums, taught

import agents
from trl_stppo import STPPOConfig, STPPOTrainer

SYSTEM = "Use the tool add."


@agents.function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def adder(client: Any, row: dict[str, Any]) -> float:
    """Answer the row's question; the reward is 1 if the answer has the sum."""
    model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
    agent = agents.Agent(name="adder", instructions=SYSTEM, tools=[add], model=model)
    result = await agents.Runner.run(agent, row["prompt"][-1]["content"])
    return float(row["answer"] in str(result.final_output))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="Name or folder of a model; a tiny taught one by default.")
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--output_dir", default="runs/openai-agents")
    options = parser.parse_args()
    agents.set_tracing_disabled(True)
    rows, calls = sums(SYSTEM)
    tiny = options.model is None
    model, tokenizer = taught(calls, loss=0.08) if tiny else (options.model, None)
    args = STPPOConfig(
        output_dir=options.output_dir, max_steps=options.updates, num_mini_batches=1,
        num_ppo_epochs=1, per_device_train_batch_size=32, gradient_accumulation_steps=1,
        logging_steps=1, learning_rate=6e-4 if tiny else 1e-6, max_turns=4,
        max_turn_tokens=64 if tiny else 512,
        max_completion_length=512 if tiny else 4096, report_to="none", bf16=not tiny, use_cpu=tiny,
    )  # fmt: skip
    trainer = STPPOTrainer(
        model=model, processing_class=tokenizer, args=args, agent=adder,
        train_dataset=Dataset.from_list(rows * 8),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
