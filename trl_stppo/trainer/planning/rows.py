"""Dataset rows, each with its prompt."""

from __future__ import annotations

from typing import Any

from . import text_only

Row = dict[str, Any]
PLACEHOLDER_PROMPT = [{"role": "user", "content": ""}]


def rows_with_prompts(
    rows: list[Row], tokenizer: Any, *, owns_prompts: bool
) -> tuple[list[Row], list[list[int]] | None]:
    """Copy rows and add a `prompt` to each; return the copies, and ids of pre-tokenised prompts or None."""
    text_only.check_rows(rows)
    pretokenized = "prompt" not in rows[0] and "input_ids" in rows[0]
    if pretokenized:
        ids = [unpadded(row, tokenizer.pad_token_id) for row in rows]
        texts = [tokenizer.decode(i) for i in ids]
        return [{**row, "prompt": t} for row, t in zip(rows, texts, strict=True)], ids
    if owns_prompts:
        return [{**row, "prompt": prompt_of(row)} for row in rows], None
    return [dict(row) for row in rows], None


def prompt_of(row: Row) -> Any:
    """Return the row's prompt, or a placeholder message if the row has none."""
    prompt = row.get("prompt")  # None if datasets with and without prompts were joined
    return list(PLACEHOLDER_PROMPT) if prompt is None else prompt


def unpadded(row: Row, pad_token_id: int) -> list[int]:
    """Return the ids of a pre-tokenised prompt without its left padding."""
    ids = [int(i) for i in row["input_ids"]]
    if row.get("attention_mask") is not None:
        return [i for i, keep in zip(ids, row["attention_mask"], strict=True) if keep]
    start = 0
    while start < len(ids) - 1 and ids[start] == pad_token_id:
        start += 1
    return ids[start:]


def is_conversational(dataset: Any) -> bool:
    """Whether a dataset's prompts are messages; also True without a prompt column."""
    from datasets import Dataset

    if not isinstance(dataset, Dataset) or "prompt" not in dataset.column_names:
        return isinstance(dataset, Dataset)
    return not isinstance(dataset[0]["prompt"], str)
