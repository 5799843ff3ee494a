"""The demo's environment, in which a rollout stops half-way until a test lets it go on."""

import os
import threading
from pathlib import Path
from typing import Any

from scripts.search.search_env import StdlibSearchEnv
from tests.kit.waiting import wait_until

_lock = threading.Lock()
_resets = 0


class PausingEnv(StdlibSearchEnv):
    """From the reset of episode `PAUSE_EPISODE` on, a step waits for the file `PAUSE_FOLDER`/go."""

    def reset(self, **row: Any) -> tuple[str, dict[str, Any]]:
        global _resets
        with _lock:
            _resets += 1
        return super().reset(**row)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        folder = Path(os.environ["PAUSE_FOLDER"])
        if _resets >= int(os.environ["PAUSE_EPISODE"]) and not (folder / "go").exists():
            (folder / "paused").touch()
            wait_until((folder / "go").exists)
        return super().step(action)
