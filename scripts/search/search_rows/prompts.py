"""Questions as chat messages."""

from __future__ import annotations

from string import ascii_uppercase
from typing import Any

from search_env.protocol import SEARCH_PROMPT, SEARCH_PROMPT_CHOICES

from .readers import Question


def as_row(question: Question, name: str, number: int, *, context: bool = True) -> dict[str, Any]:
    """A row as the trainer takes it.

    Args:
        question: what is asked.
        name: of the data set.
        number: of the question in its split, for an `id` where the data set has none.
        context: whether a text that comes with the question is part of the prompt.
    """
    protocol = SEARCH_PROMPT_CHOICES if question.choices else SEARCH_PROMPT
    # The question has a message of its own.
    protocol = protocol.strip().removesuffix("Question:").strip()
    return {
        "prompt": [
            {"role": "system", "content": protocol},
            {"role": "user", "content": user_text(question, context=context)},
        ],
        "answers": list(question.answers),
        "choices": list(question.choices),
        "dataset": name,
        "id": question.id or f"{name}-{number}",
        "question": question.question,
    }


def user_text(question: Question, *, context: bool = True) -> str:
    """The question, after its context, before its lettered choices."""
    lines = [question.question]
    if context and question.context:
        lines = [f"Context: {question.context}", "", f"Question: {question.question}"]
    lines += [f"{letter}) {text}" for letter, text in zip(ascii_uppercase, question.choices, strict=False)]
    return "\n".join(lines)
