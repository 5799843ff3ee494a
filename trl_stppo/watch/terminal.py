"""A terminal whose last lines are redrawn all the time, while others go on printing above them."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

from rich.ansi import AnsiDecoder
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderResult
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment, SegmentLines
from rich.text import Text

REDRAWS_PER_SECOND = 2


def can_be_live() -> bool:
    """Whether stdout is a terminal on which lines can be redrawn, and nothing else is wished."""
    if not _is_terminal(sys.stdout):
        return False
    console = Console(file=sys.stdout)
    return console.is_terminal and not console.is_dumb_terminal


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # none at all, or closed
        return False


class Above(io.TextIOBase):
    """Stands in for stdout or stderr: what is written to it appears above the live lines.

    rich brings such a stream, past which another `Console` writes, as TRL's table of completions does.
    Progress bars, which go back to the beginning of their line, appear once they have ended theirs.
    """

    def __init__(self, console: Console, stream: TextIO) -> None:
        self._console, self.stream = console, stream
        self._decoder, self._line, self._lock = AnsiDecoder(), "", threading.RLock()

    def write(self, text: str) -> int:
        """Print whole lines, keep the rest."""
        with self._lock:
            *lines, rest = (self._line + text).split("\n")
            begins, ends = ("\r" if found else "" for found in ("\r" in rest, rest.endswith("\r")))
            self._line = begins + _last_drawn(rest) + ends
            if lines:
                self._print("\n".join(map(_last_drawn, lines)))
        return len(text)

    def flush(self) -> None:
        """Print an unfinished line too, a question for instance, unless it is a progress bar."""
        with self._lock:
            if self._line and "\r" not in self._line:
                line, self._line = self._line, ""
                self._print(line)

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal has gone; what runs goes on
            lines = self._decoder.decode(text) if text else [Text()]
            for line in lines:
                self._console.print(line, soft_wrap=True, highlight=False)

    def finish(self) -> None:
        """Print what is left."""
        line, self._line = _last_drawn(self._line), ""
        if line.strip():
            self._print(line)

    def isatty(self) -> bool:
        """As the stream that it stands in for."""
        return self.stream.isatty()

    def fileno(self) -> int:
        """Likewise."""
        return self.stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Likewise."""
        return self.stream.encoding

    def writable(self) -> bool:
        """Always."""
        return True


def _last_drawn(line: str) -> str:
    """What a line with returns in it shows in the end."""
    return line.rstrip("\r").rpartition("\r")[2]


def _plain_streams() -> None:
    """A forked child prints for itself: it has no thread that redraws, and shares no lock."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, Above):
            setattr(sys, name, stream.stream)


class _Redrawn(Live):
    """rich's, for a terminal that may have become narrower, and wrapped lines, since the last redraw.

    rich goes up by as many lines as it has drawn, which would leave the first of them behind.
    """

    wrapped: Callable[[], int]

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """What rich prints in one go, after going up by the lines that wrapping has added."""
        found, more = super().process_renderables(renderables), self.wrapped()
        erase, up = (ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)
        return [Control(erase, *((up, erase) * more)), *found] if more else found


def _wraps_again() -> bool:
    """Whether a terminal that becomes narrower wraps what it shows; these cut it off instead."""
    return os.environ.get("TERM") != "linux" and "XTERM_VERSION" not in os.environ


class LiveTerminal:
    """Keeps a renderable at the end of the terminal, from `start` to `stop`.

    The cursor stays visible, so that a process that is killed leaves a terminal as usable as before.

    Args:
        panel: what to show.
        stopping: turns true once somebody has written past us, as a signal handler must.
    """

    _forks = False

    def __init__(self, panel: RenderableType, stopping: Callable[[], bool] = lambda: False) -> None:
        self._panel, self._stopping = panel, stopping
        self._live: _Redrawn | None = None
        self._drawn: list[int] = []  # widths of the lines that are on the screen
        self._streams: dict[str, Above] = {}
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._moved = False

    @property
    def running(self) -> bool:
        """Whether the lines are being redrawn."""
        return self._live is not None

    def start(self) -> None:
        """Begin to draw, and take over what others print."""
        if self._live is not None:
            return
        if not LiveTerminal._forks and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_plain_streams)
            LiveTerminal._forks = True
        self._console = Console(file=sys.stdout, highlight=False)
        self._live = _Redrawn(
            self,
            console=self._console,
            refresh_per_second=REDRAWS_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.wrapped = self._wrapped
        self._drawn, self._moved = [], False
        with contextlib.suppress(OSError):
            self._live.start()
            self._console.show_cursor(True)
        self._take_streams()

    def _take_streams(self) -> None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if _is_terminal(stream) and not isinstance(stream, Above):
                self._streams[name] = Above(self._console, stream)
                setattr(sys, name, self._streams[name])
        # Handlers that were made before hold the stream itself.
        stands_in = {id(above.stream): above for above in self._streams.values()}
        loggers = [logging.getLogger(), *logging.root.manager.loggerDict.values()]
        for logger in loggers:
            for handler in getattr(logger, "handlers", ()):
                stream = getattr(handler, "stream", None)
                if isinstance(handler, logging.StreamHandler) and id(stream) in stands_in:
                    self._handlers.append((handler, stream))
                    handler.setStream(stands_in[id(stream)])

    def _give_back(self) -> None:
        for handler, stream in self._handlers:
            if isinstance(handler.stream, Above):
                handler.setStream(stream)
        for name, above in self._streams.items():
            if getattr(sys, name) is above:
                setattr(sys, name, above.stream)
        self._handlers, self._streams = [], {}

    def _wrapped(self) -> int:
        """Lines that a narrower terminal has made of those that were drawn, beyond their number."""
        if not _wraps_again():
            return 0
        return sum((width - 1) // self._console.width for width in self._drawn if width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The panel; below what was written past us, if it was."""
        try:
            lines = console.render_lines(self._panel, options, pad=False)
        except Exception as error:  # nothing that is only to be looked at may end a training
            said = Text(f"The live view cannot be drawn: {type(error).__name__}: {error}")
            lines = console.render_lines(said, options, pad=False)
        self._drawn = [Segment.get_line_length(line) for line in lines]
        if self._stopping() and not self._moved:
            self._moved = True
            # The redraw goes up by the height of what it has drawn last.
            with contextlib.suppress(OSError):
                self._console.file.write("\n" * (len(lines) - 1))
        yield SegmentLines(lines, new_lines=True)

    def refresh(self) -> None:
        """Draw now."""
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.refresh()

    def stop(self) -> None:
        """Draw once more, and leave the terminal as it was."""
        live, self._live = self._live, None
        if live is None:
            return
        for above in self._streams.values():
            above.finish()
        try:
            with contextlib.suppress(OSError):
                live.stop()
        finally:
            self._give_back()
