"""Watch runs: progress lines during training, curves afterwards. Modules load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_LAZY = {
    "ProgressLines": "trl_stppo.watch.lines",
    "MetricsFile": "trl_stppo.watch.metrics_file",
    "Run": "trl_stppo.watch.runs",
    "draw_curves": "trl_stppo.watch.plot",
    "read_run": "trl_stppo.watch.runs",
}
__all__ = ["MetricsFile", "ProgressLines", "Run", "draw_curves", "read_run"]

if TYPE_CHECKING:
    from .lines import ProgressLines
    from .metrics_file import MetricsFile
    from .plot import draw_curves
    from .runs import Run, read_run


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
