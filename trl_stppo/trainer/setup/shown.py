"""What a model is shown: prompts and tools, looked at before weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...envs.base import tool_names
from ...envs.check import check_schema
from ...rollout.reward_funcs import name_of


def check_prompt(prompt: Any, name: str) -> str | None:
    """Refuse a row's prompt that is neither text nor messages; None is an environment's to fill.

    Returns:
        A warning of a message that chat templates pass over.
    """
    if prompt is None or isinstance(prompt, str):
        return None
    messages = isinstance(prompt, list | tuple)
    if messages and all(isinstance(m, Mapping) and "role" in m for m in prompt):
        silent = (m for m in prompt if not {"content", "tool_calls"} & m.keys())
        odd = next((m for m in prompt if m["role"] in ("human", "gpt")), next(silent, None))
        usual = "role 'user', 'assistant' or 'system', and `content`"
        return (
            odd
            and f"{name} has {_short(odd)}, which a chat template may leave out: usual are {usual}."
        )
    fix = "Write it as [prompt]" if isinstance(prompt, Mapping) else "Map the column to one of them"
    raise ValueError(
        f"{name} is a {type(prompt).__name__}, {_short(prompt)}; allowed are text, or a list of messages "
        f"({{'role': 'user', 'content': ...}}). {fix}."
    )


def check_no_empty(dataset: Any, name: str, column: str, *, by_environment: bool) -> None:
    """Refuse a dataset with a row that shows a model nothing; all rows are looked at.

    Args:
        dataset: of `datasets`.
        name: of the argument.
        column: with the prompts, as text, messages or ids.
        by_environment: whether None and an empty text may stand there, for an environment to fill.
    """
    row = 0
    for table in dataset.select_columns(column).with_format("arrow").iter(10_000):
        for chunk in table[column].chunks:
            # Lengths of lists: messages would take long to become Python's.
            values = chunk.value_lengths() if hasattr(chunk, "value_lengths") else chunk
            for value in values.to_pylist():
                if not value and not (by_environment and value != 0):
                    said = "[]" if value == 0 else repr(value)
                    raise ValueError(
                        f"`{column}` of row {row} of `{name}` is {said}, which leaves nothing to show the "
                        f"model. Drop such rows, or give them a prompt."
                    )
                row += 1


def check_tools(tools: Sequence[Any], environments: Mapping[Any, Any]) -> None:
    """Refuse tools that cannot be described to a model.

    Args:
        tools: functions.
        environments: instances whose public methods are tools, by name.

    Raises:
        EnvironmentContractError: by name of the function.
    """
    named = {f"`tools[{i}]` ({name_of(tool)})": tool for i, tool in enumerate(tools)}
    for env in environments.values():
        kind = type(env).__name__
        named |= {f"`environment_factory`: {kind}.{m}": getattr(env, m) for m in tool_names(env)}
    for name, tool in named.items():
        if not callable(tool):
            raise TypeError(f"{name} is {_short(tool)}, and no function. Pass the function itself.")
        check_schema(name, tool)


def _short(value: Any, length: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= length else f"{text[:length]}..."
