"""The console script `trl-stppo`; `docs/configuration.md` lists the commands.

Nothing heavy is imported until a command needs it, so that `--help` answers at once.
"""

from .main import main

__all__ = ["main"]
