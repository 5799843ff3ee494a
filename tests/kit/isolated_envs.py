"""Environments for processes of their own; the module is light, since each process imports it."""

import asyncio
import os


class Dangerous:
    """Tools that end the process, or never return; another one's name is awkward."""

    async def reset(self, doom="", **row):
        self.turn_rewards = []
        self.do(doom)
        return f" {doom}"

    def do(self, x: str) -> str:
        """Do it.\n\nArgs:\n    x: what."""
        while x == "hang":
            pass
        if x == "exit":
            os._exit(3)
        if x == "leave":
            raise SystemExit(4)
        self.turn_rewards.append(0.5)
        return f"did {x}"

    async def later(self, x: str) -> str:
        """Do it later.\n\nArgs:\n    x: what."""
        await asyncio.sleep(0)
        return self.do(x)

    def get(self, x: str) -> str:
        """Get.\n\nArgs:\n    x: what."""
        return f"got {x}"

    async def get_reward(self):
        return 1.0


class Echo:
    """A text environment whose methods are asynchronous."""

    async def reset(self, seed, letter="a"):
        self.seed, self.letter = seed, letter
        return letter, {}

    async def step(self, action):
        return action + self.letter, 1.0, action == "stop", False, {}


class LoopBound:
    """Synchronous tools that look up their thread's event loop, or return what must be awaited."""

    def reset(self, **row):
        return None

    def run(self, x: str) -> str:
        """Run.\n\nArgs:\n    x: what."""
        return asyncio.run(asyncio.sleep(0, x))

    def look(self, x: str) -> str:
        """Look.\n\nArgs:\n    x: what."""
        return asyncio.get_event_loop().run_until_complete(asyncio.sleep(0, x))

    def later(self, x: str) -> str:
        """Return a task.\n\nArgs:\n    x: what."""
        return asyncio.get_event_loop().create_task(asyncio.sleep(0, x))
