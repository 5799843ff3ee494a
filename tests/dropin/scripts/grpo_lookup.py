"""An agent that looks things up in a database by a tool, as a user of TRL 1.16 writes it."""

import signal
import sqlite3
from contextlib import contextmanager

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser


@contextmanager
def at_most(seconds: int):
    """An alarm, which Python allows on the main thread only."""

    def give_up(number, frame):
        raise RuntimeError(f"no answer within {seconds} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def query(command: str) -> list[tuple]:
    """
    Run a reading SQL command on the table `genes`.

    Args:
        command: The SQL command.

    Returns:
        The rows that were found.
    """
    with at_most(5):
        connection = sqlite3.connect("file:genes.db?mode=ro", uri=True)
        try:
            return connection.execute(command).fetchall()
        finally:
            connection.close()


def correctness(completions, answer, **kwargs):
    """The last message says the right word."""
    said = [completion[-1]["content"].lower() for completion in completions]
    return [0.6 if right.lower() in words else -0.5 for words, right in zip(said, answer, strict=True)]


def evidence(completions, **kwargs):
    """Queries that found something; what failed costs."""
    rewards = []
    for completion in completions:
        results = [turn["content"] for turn in completion if turn.get("role") == "tool"]
        calls = [call for turn in completion for call in turn.get("tool_calls") or []]
        named = all("command" in call["function"]["arguments"] for call in calls)
        found = sum(isinstance(result, list) and len(result) > 0 for result in results)
        rewards.append(found - (len(results) - found) + (0.1 if named else -1.0))
    return rewards


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
    script, training, model = parser.parse_args_and_config()

    genes = load_dataset(script.dataset_name, split="train").to_pandas()
    connection = sqlite3.connect("genes.db")
    genes.to_sql("genes", connection, if_exists="replace", index=False)
    connection.close()

    rows = load_dataset(f"{script.dataset_name}_qa", split="train")
    rows = rows.filter(lambda row: row["question"].startswith("Is "))
    rows = rows.map(
        lambda row: {"prompt": [{"role": "user", "content": row["question"]}]},
        remove_columns=["question"],
    )
    training.chat_template_kwargs = {"enable_thinking": False}
    trainer = GRPOTrainer(
        model=model.model_name_or_path, train_dataset=rows, eval_dataset=None, tools=[query],
        reward_funcs=[correctness, evidence], args=training,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(training.output_dir)
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
