"""The record of an update in progress."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class OpenRecord:
    """The record of a rollout batch whose update is not over, or of an evaluation."""

    header: dict[str, Any]
    episodes: list[dict[str, Any]] = field(default_factory=list)
    batch: dict[str, Tensor] = field(default_factory=dict)
    passes: dict[str, Tensor] = field(default_factory=dict)
    outcomes: list[tuple[str, Tensor]] = field(default_factory=list)

    def observe(self, rows: Tensor, figures: dict[str, Tensor]) -> None:
        """Store the values, [b, t] each, of the recorded rows."""
        size = len(self.episodes)
        slots = rows.clamp(max=size)
        for name, values in figures.items():
            if name not in self.passes:
                length = self.batch["completion_ids"].size(1)
                self.passes[name] = values.new_zeros(size + 1, length)
            kept = self.passes[name]
            kept[slots, : values.size(1)] = values.detach().to(kept.dtype)

    def outcomes_of_rows(self) -> list[Counter[str]]:
        """Return the number of passes by outcome, for each recorded row."""
        counts = [Counter[str]() for _ in self.episodes]
        if self.outcomes:
            rows = torch.cat([rows for _, rows in self.outcomes]).tolist()
            names = [name for name, rows in self.outcomes for _ in range(len(rows))]
            for row, name in zip(rows, names, strict=True):
                if row < len(counts):
                    counts[row][name] += 1
        return counts
