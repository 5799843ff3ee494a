"""A stand-in of the package `gem-llm`, whose games draw from the generators of the whole process."""

import random
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Dice:
    """Draws from the global generator, as GEM's games do."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        if seed is not None:
            random.seed(seed)
        return f"A die shows {random.randint(1, 6)}.\n", {"suffix": "Board."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "?":
            return "no", -0.1, True, True, {}
        if action == "win":
            return "Congratulations! All found.", 0.25, True, False, {}
        if action == "slow":
            random.random()
            time.sleep(0.001)
        return str(random.random()), 1.0 if action == "solve" else 0.0, action == "solve", False, {}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `import gem` find it for the length of a test."""
    package, utils, constants = (ModuleType(n) for n in ("gem", "gem.utils", "gem.utils.constants"))
    package.make = lambda env_id, **options: Dice()
    constants.LanguageGameReward = SimpleNamespace(success_reward=1.0, format_error_reward=-0.1)
    package.utils, utils.constants = utils, constants
    for module in (package, utils, constants):
        monkeypatch.setitem(sys.modules, module.__name__, module)
