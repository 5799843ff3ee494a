"""The console script `trl-stppo`. Heavy imports are inside the commands, so that `--help` is fast."""

from .main import main

__all__ = ["main"]
