"""Daemon threads whose start cannot hang.

Under a memory limit a thread can die while it starts, and Python's `Thread.start` then never returns.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from .errors import ThreadStartError

START_SECONDS = 60.0


class LazyLoop(asyncio.SelectorEventLoop):
    """An event loop that is built, with its three file descriptors, when it is first used."""

    def __init__(self) -> None:
        """Build nothing yet."""

    def __getattr__(self, name: str) -> Any:
        # Before the first use all attributes are missing.
        if "_ready" in vars(self):
            raise AttributeError(name)
        super().__init__()
        return getattr(self, name)

    def __del__(self) -> None:
        if vars(self):
            self.close()


class _Begun(threading.Event):
    """Event that a thread sets when it runs. `Thread.start` waits for the event, at most a minute."""

    def wait(self, timeout: float | None = None) -> bool:
        if not super().wait(START_SECONDS if timeout is None else timeout):
            raise RuntimeError(f"it did not run within {START_SECONDS:.0f} s")
        return True


class DaemonThread(threading.Thread):
    """A thread that runs `target(*args)` and does not keep the process alive."""

    def __init__(self, target: Callable[..., object], name: str, *args: object) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._started = _Begun()

    def run(self) -> None:
        """Run the target on a thread that has an event loop, as the main thread has."""
        asyncio.set_event_loop(LazyLoop())
        super().run()

    def start(self) -> None:
        """Start the thread; raise `ThreadStartError` if it does not run."""
        try:
            super().start()
        except (RuntimeError, MemoryError) as error:
            raise ThreadStartError(
                f"The thread {self.name!r} could not be started ({error}). Raise `ulimit -v` or `ulimit -u`."
            ) from error
