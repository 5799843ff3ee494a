"""Dataset rows, each with its prompt."""

from __future__ import annotations

from typing import Any

from . import text_only

Row = dict[str, Any]
PLACEHOLDER_PROMPT = [{"role": "user", "content": ""}]


def rows_with_prompts(
    rows: list[Row], tokenizer: Any, *, owns_prompts: bool
) -> tuple[list[Row], list[list[int]] | None]:
    """Copy rows and give each a prompt that templates read; return them, and pre-tokenised ids or None."""
    text_only.check_columns("The dataset", rows[0])
    pretokenized = "prompt" not in rows[0] and "input_ids" in rows[0]
    if pretokenized:
        ids = [unpadded(row, tokenizer) for row in rows]
        texts = [tokenizer.decode(i) for i in ids]
        return [{**row, "prompt": t} for row, t in zip(rows, texts, strict=True)], ids
    prompts = [text_only.read_prompt(row.get("prompt")) for row in rows]
    # A prompt is None if datasets with and without prompts were joined.
    if owns_prompts:
        prompts = [list(PLACEHOLDER_PROMPT) if p is None else p for p in prompts]
    return [{**row, "prompt": p} for row, p in zip(rows, prompts, strict=True)], None


def unpadded(row: Row, tokenizer: Any) -> list[int]:
    """Return the ids of a pre-tokenised prompt without its left padding."""
    ids = [int(i) for i in row["input_ids"]]
    if row.get("attention_mask") is not None:
        return [i for i, keep in zip(ids, row["attention_mask"], strict=True) if keep]
    start, pad = 0, tokenizer.pad_token_id
    # A prompt may begin with the padding token.
    if pad == tokenizer.bos_token_id:
        return ids
    while start < len(ids) - 1 and ids[start] == pad:
        start += 1
    return ids[start:]


def is_conversational(dataset: Any) -> bool:
    """Whether a dataset's prompts are messages; also True without a prompt column."""
    from datasets import Dataset

    if not isinstance(dataset, Dataset) or "prompt" not in dataset.column_names:
        return isinstance(dataset, Dataset)
    return not isinstance(dataset[0]["prompt"], str)
