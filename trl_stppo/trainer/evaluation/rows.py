"""Names the episodes of an evaluation by row of the dataset and repetition."""

from __future__ import annotations

from typing import Any

from ..loop.rollout import EpisodeKey

# Column of the name in the dataloader's rows; environments and functions never get it.
COLUMN = "_evaluation_episode"


class NamedRows:
    """A dataset with an entry per episode: each row `repetitions` times, with its name."""

    def __init__(self, dataset: Any, repetitions: int) -> None:
        self._dataset, self._repetitions = dataset, repetitions

    def __len__(self) -> int:
        return len(self._dataset) * self._repetitions

    def __getitem__(self, index: int) -> dict[str, Any]:
        row, repetition = divmod(index, self._repetitions)
        return {**self._dataset[row], COLUMN: [row, repetition]}


def named_rows(dataset: Any, repetitions: int) -> Any:
    """Return the dataset with an entry per episode; a stream stays a stream."""
    from datasets import IterableDataset

    if not isinstance(dataset, IterableDataset):
        return NamedRows(dataset, repetitions)

    def repeated(columns: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        result = {
            key: [v for v in values for _ in range(repetitions)] for key, values in columns.items()
        }
        result[COLUMN] = [[row, number] for row in indices for number in range(repetitions)]
        return result

    return dataset.map(repeated, with_indices=True, batched=True, batch_size=1)


def take_names(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[EpisodeKey] | None]:
    """Return rows without their names, and the names; these are None for rows of the training data."""
    if COLUMN not in rows[0]:
        return rows, None
    names = [(int(row[COLUMN][0]), int(row[COLUMN][1])) for row in rows]
    return [{k: v for k, v in row.items() if k != COLUMN} for row in rows], names
