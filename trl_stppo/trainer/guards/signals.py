"""Handling of SIGTERM and SIGINT: the first signal requests a stop instead of killing the process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

NOTICE = (
    "\n{name} received: the training stops after the current optimizer step and saves a checkpoint. "
    "A further SIGINT (Ctrl-C) stops it at once, without one.\n"
)
Handler = Callable[[int, FrameType | None], Any] | int | None


class StopSignals:
    """Stores the first signal until the training reaches a point at which it can stop.

    transformers' own handler for `enable_jit_checkpoint` is not used: it saves on the process that got
    the signal, while the others wait for its gradients, and between a gradient and its step, from which
    a run cannot resume exactly. `enabled=False` leaves all signals unchanged.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._kept: dict[int, Handler] = {}
        self.received: int | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager that handles SIGTERM and SIGINT, if entered in the main thread."""
        self.received = None
        if not self._enabled or threading.current_thread() is not threading.main_thread():
            yield
            return
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                handler = signal.getsignal(number)
                # A background job ignores SIGINT; None is a handler that is not Python's.
                if handler not in (signal.SIG_IGN, None):
                    self._kept[number] = handler
                    signal.signal(number, self._receive)
            yield
        finally:
            for kept, handler in self._kept.items():
                signal.signal(kept, handler)
            self._kept = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            # Not `print`: the signal may have interrupted one.
            os.write(2, NOTICE.format(name=signal.Signals(number).name).encode())
        elif number == signal.SIGINT:
            previous = self._kept[number]
            if not callable(previous):
                raise KeyboardInterrupt
            previous(number, frame)
