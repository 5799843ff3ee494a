"""Watch runs: progress lines during training, curves afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .plot import draw_curves
from .runs import Run, read_run

if TYPE_CHECKING:
    from .lines import ProgressLines

__all__ = ["ProgressLines", "Run", "draw_curves", "read_run"]


def __getattr__(name: str) -> Any:
    if name != "ProgressLines":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Import it only now, because it imports transformers, which the commands do not need.
    from .lines import ProgressLines

    return ProgressLines
