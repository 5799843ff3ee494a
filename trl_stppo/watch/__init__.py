"""Watch runs: progress lines during training (`lines`), curves afterwards. Needs no transformers."""

from .plot import draw_curves
from .runs import Run, read_run

__all__ = ["Run", "draw_curves", "read_run"]
