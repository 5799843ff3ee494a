"""Stand-ins for the packages through which TRL's OpenEnv examples reach game servers."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

ECHO = """
from types import SimpleNamespace as Record


class EchoEnv:
    def __init__(self, base_url): pass

    def step(self, action):
        said = action.message
        return Record(observation=Record(reward=len(said) / 10, echoed_message=said))


class EchoAction:
    def __init__(self, message): self.message = message
"""
CATCH = """
from types import SimpleNamespace as Record


class OpenSpielEnv:
    def __init__(self, base_url): pass

    def reset(self):
        self.time, self.paddle = 0, 2
        return self.seen()

    def step(self, action):
        self.time += 1
        self.paddle = min(4, max(0, self.paddle + action.action_id - 1))
        return self.seen()

    def seen(self):
        cells, done = [0.0] * 50, self.time >= 3
        cells[self.time * 5 + 2] = cells[45 + self.paddle] = 1.0
        reward = (1.0 if self.paddle == 2 else -1.0) if done else 0.0
        return Record(observation=Record(done=done, info_state=cells), reward=reward)

    def close(self): pass


class OpenSpielAction:
    def __init__(self, action_id, game_name): self.action_id = action_id
"""
PACKAGES = {"echo_env": ECHO, "openspiel_env": CATCH}


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write them into a folder from which scripts import, and forget others of their names."""
    for name, source in PACKAGES.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(source)
        (folder / name / "models.py").write_text(f"from {name} import *\n")
        for module in (name, f"{name}.models"):
            monkeypatch.delitem(sys.modules, module, raising=False)
    parents = "openenv", "openenv.core", "openenv.core.containers"
    for name in (*parents, "openenv.core.containers.runtime"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["openenv.core.containers.runtime"].LocalDockerProvider = object  # type: ignore[attr-defined]
