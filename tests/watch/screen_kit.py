"""A small terminal: what a screen shows after the bytes that a program has written to it."""

from __future__ import annotations

import os
import re
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.waiting import PATIENCE

_SEQUENCE = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])")


class Screen:
    """Lines without an end, so that nothing scrolls away; long ones wrap at `columns`.

    Args:
        columns: width.

    Attributes:
        lines: what they show, colours left out.
        cursor_shown: whether the cursor is.
        colours: whether any sequence set one.
    """

    def __init__(self, columns: int = 80) -> None:
        self.columns, self.cursor_shown, self.colours = columns, True, False
        self._rows: list[list[str]] = [[]]
        self._row = self._column = 0

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._rows]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def feed(self, text: str) -> Screen:
        """Take in what was written."""
        at = 0
        for found in _SEQUENCE.finditer(text):
            self._print(text[at : found.start()])
            self._obey(found.group(1), found.group(2))
            at = found.end()
        self._print(text[at:])
        return self

    def narrow(self, columns: int) -> Screen:
        """Become narrower, as most terminals do it: longer lines wrap, and the cursor stays at its text."""
        rows, at = [], 0
        for index, row in enumerate(self._rows):
            parts = [row[i : i + columns] for i in range(0, len(row), columns)] or [[]]
            if index == self._row:
                part = max(0, self._column - 1) // columns
                at, self._column = len(rows) + part, self._column - part * columns
            rows += parts
        self._rows, self._row, self.columns = rows, at, columns
        return self

    def _obey(self, arguments: str, command: str) -> None:
        count = int(arguments) if arguments.isdigit() else 1
        if command == "A":
            self._row = max(0, self._row - count)
        elif command == "K":
            self._rows[self._row] = []
        elif command == "m":
            codes = arguments.split(";")
            self.colours |= any(code[:1] in "349" and len(code) == 2 for code in codes)
        elif arguments == "?25":
            self.cursor_shown = command == "h"
        else:
            raise AssertionError(f"this terminal does not know {arguments}{command}")

    def _print(self, text: str) -> None:
        for character in text:
            if character == "\n":
                self._down()
                self._column = 0  # a terminal's driver adds the return
            elif character == "\r":
                self._column = 0
            else:
                if self._column == self.columns:
                    self._down()
                    self._column = 0
                row = self._rows[self._row]
                row += [" "] * (self._column + 1 - len(row))
                row[self._column] = character
                self._column += 1

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append([])


@contextmanager
def terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int = 80, lines: int = 50, **environment: str
) -> Iterator[list[str]]:
    """Makes stdout and stderr one real pseudo-terminal; gives the list that holds, afterwards, all text."""
    import fcntl
    import pty
    import termios

    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    settings = {"COLUMNS": str(columns), "LINES": str(lines), "TERM": "xterm-256color"}
    for name, value in (settings | environment).items():
        monkeypatch.setenv(name, value)
    written: list[bytes] = []
    reader = threading.Thread(target=_drain, args=(master, written), daemon=True)
    reader.start()
    seen: list[str] = []
    with (
        os.fdopen(slave, "w", encoding="utf-8", buffering=1) as stream,
        monkeypatch.context() as patch,
    ):
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        try:
            yield seen
        finally:
            stream.flush()
    reader.join(PATIENCE)
    os.close(master)
    seen.append(b"".join(written).decode("utf-8"))


def _drain(master: int, written: list[bytes]) -> None:
    while True:
        try:
            data = os.read(master, 65536)
        except OSError:  # the other end is closed
            return
        if not data:
            return
        written.append(data)
