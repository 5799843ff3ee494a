"""Signals that end a run: stored until the run can end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

NOTICE = (
    "\n{name} received: the training abandons its rollout, or ends its update, and saves a checkpoint.\n"
    "In an update a second signal saves after the present step. A further SIGINT (Ctrl-C) stops it at\n"
    "once, without a checkpoint.\n"
)
# Number of signals after which an update does not go on to its end.
URGENT = 2
Handler = Callable[[int, FrameType | None], object] | int | None


class StopSignals:
    """Stores the first signal until the run can end, and counts the signals.

    transformers' own handler for `enable_jit_checkpoint` is not used. It saves on the process that got the
    signal, while the other processes wait for its gradients. It may save between a gradient and its step,
    and a run cannot resume exactly from there. `enabled=False` leaves all signals unchanged.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._kept: dict[int, Handler] = {}
        self._interrupt: Callable[[], None] | None = None
        self.received: int | None = None
        self.count = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager that handles SIGTERM and SIGINT, if entered in the main thread."""
        self.received, self.count = None, 0
        if not self._enabled or threading.current_thread() is not threading.main_thread():
            yield
            return
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                handler = signal.getsignal(number)
                # A background job must keep ignoring SIGINT. None is a handler that C code has set.
                if handler not in (signal.SIG_IGN, None):
                    self._kept[number] = handler
                    signal.signal(number, self._receive)
            yield
        finally:
            for kept, handler in self._kept.items():
                signal.signal(kept, handler)
            self._kept = {}

    @contextmanager
    def interrupting(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """Context manager of a rollout, in which the first signal calls `interrupt` at once."""
        self._interrupt = interrupt
        try:
            if self.received is not None:
                interrupt()
            yield
        finally:
            self._interrupt = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.received is None:
            self.received = number
            # `print` is not safe, because the signal may have interrupted another `print`.
            os.write(2, NOTICE.format(name=signal.Signals(number).name).encode())
            if self._interrupt is not None:
                self._interrupt()
        elif number == signal.SIGINT and (self._interrupt is not None or self.count > URGENT):
            previous = self._kept[number]
            if not callable(previous):
                raise KeyboardInterrupt
            previous(number, frame)
