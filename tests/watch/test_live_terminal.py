"""The live lines on a real pseudo-terminal: whatever else prints appears whole, above them."""

from __future__ import annotations

import logging
import os
import sys
import threading

import pytest
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from tqdm import tqdm

from tests.waiting import PATIENCE
from tests.watch.screen_kit import Screen, terminal
from trl_stppo.watch.terminal import Above, LiveTerminal, can_be_live

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are POSIX")
PANEL = "one\ntwo\nthree"


def test_what_others_print_stays_above(monkeypatch):
    with terminal(monkeypatch) as seen:
        early = logging.StreamHandler()  # made before, so it knows the terminal itself
        logger = logging.getLogger("tests.early")
        logger.addHandler(early)
        live = LiveTerminal(PANEL)
        live.start()
        print("printed")
        live.refresh()
        print("to stderr", file=sys.stderr)
        logger.warning("logged")
        table = Table("head", title="a table")
        table.add_row("[bold]cell[/]")
        Console().print(table)  # as TRL prints completions
        for _ in tqdm(range(3), desc="bar"):
            pass
        live.refresh()
        print("unfinished", end="")
        live.stop()
        print("afterwards")
        assert early.stream is sys.stderr
        logger.removeHandler(early)
    lines = Screen().feed(seen[0]).lines
    for text in ("printed", "to stderr", "logged"):
        assert lines.count(text) == 1, text
    text = "\n".join(lines)
    for words in ("a table", "cell", "bar: 100%", "unfinished"):
        assert text.count(words) == 1, words
    assert lines[-5:-1] == ["one", "two", "three", "afterwards"]
    assert text.count("three") == 1


def test_the_terminal_is_as_it_was(monkeypatch):
    with terminal(monkeypatch) as seen:
        streams = sys.stdout, sys.stderr
        live = LiveTerminal(PANEL)
        live.start()
        assert isinstance(sys.stdout, Above)
        assert live.running
        live.start()  # once is enough
        live.stop()
        live.stop()
        assert (sys.stdout, sys.stderr) == streams
        assert not live.running
        drawing = [thread for thread in threading.enumerate() if "Refresh" in str(thread)]
        for thread in drawing:
            thread.join(PATIENCE)
    assert Screen().feed(seen[0]).cursor_shown
    assert seen[0].rfind("\x1b[?25h") > seen[0].rfind("\x1b[?25l"), "also while it is drawn"
    assert not any(thread.is_alive() for thread in drawing)


def test_a_killed_process_leaves_the_cursor(monkeypatch):
    with terminal(monkeypatch) as seen:
        live = LiveTerminal(PANEL)
        live.start()
        at_a_kill = sys.stdout.stream  # nothing is written any more
        live._live._refresh_thread.stop()  # type: ignore[union-attr]
        live._give_back()
        live._live.console.clear_live()  # type: ignore[union-attr]
        assert at_a_kill is sys.stdout
    assert Screen().feed(seen[0]).cursor_shown


def test_a_panel_that_cannot_be_drawn_says_so_and_nothing_else_happens(monkeypatch):
    class Broken:
        def __rich_console__(self, console, options):
            raise RuntimeError("no [bold]figures")

    with terminal(monkeypatch) as seen:
        live = LiveTerminal(Broken())
        live.start()
        live.refresh()
        live.stop()
    assert "cannot be drawn: RuntimeError: no [bold]figures" in Screen().feed(seen[0]).text


def test_a_terminal_that_goes_away_ends_the_view_alone(monkeypatch):
    with terminal(monkeypatch):
        live = LiveTerminal(PANEL)
        live.start()

        def gone(*args):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(live._console, "_write_buffer", gone)
        print("into nothing")
        live.refresh()
        live.stop()
        monkeypatch.undo()
        assert not isinstance(sys.stdout, Above)


@pytest.mark.parametrize("wraps", [True, False])
def test_a_terminal_that_becomes_narrower(wraps, monkeypatch):
    """Nothing of the wider panel stays, whether it is redrawn or something is printed first."""
    mark = "\x00"
    if not wraps:
        monkeypatch.setenv("XTERM_VERSION", "XTerm(390)")
    with terminal(monkeypatch, columns=80) as seen:
        live = LiveTerminal(Panel("figures", title="panel"))
        live.start()
        print("printed before")
        for width in (50, 23):
            live.refresh()
            with live._live._lock:  # type: ignore[union-attr]  # or its thread could draw in between
                sys.stdout.stream.write(mark)
                live._console.size = (width, 50)
            print(f"printed at {width}")
        live.stop()
    screen = Screen()
    for part, width in zip(seen[0].split(mark), (50, 23, None), strict=True):
        screen.feed(part)
        if width and wraps:
            screen.narrow(width)
        elif width:
            screen.columns = width
    lines = [line for line in screen.lines if line]
    if wraps:
        assert lines[:3] == ["printed before", "printed at 50", "printed at 23"]
        assert [line[0] for line in lines[3:]] == ["╭", "│", "╰"]
        assert {len(line) for line in lines[3:]} == {23}
    else:
        assert lines[:3] == ["printed before", "printed at 50", "printed at 23"], "nothing is lost"


def test_what_a_signal_handler_writes_stays_readable(monkeypatch):
    received = []
    with terminal(monkeypatch) as seen:
        live = LiveTerminal(PANEL, lambda: bool(received))
        live.start()
        live.refresh()
        with live._live._lock:  # type: ignore[union-attr]  # or its thread could draw in between
            received.append(2)
            os.write(sys.stdout.fileno(), b"\nSIGINT received: stopping.\n")
        live.refresh()
        live.refresh()
        print("later")
        live.stop()
    lines = Screen().feed(seen[0]).lines
    assert lines == [
        *("one", "two", "three", "SIGINT received: stopping."),
        *("later", "one", "two", "three", ""),
    ]


def test_a_forked_child_prints_for_itself(monkeypatch):
    with terminal(monkeypatch) as seen:
        live = LiveTerminal(PANEL)
        live.start()
        with live._live._lock:  # type: ignore[union-attr]  # as while the thread is drawing
            child = os.fork()
            if child == 0:
                print("from the child", flush=True)
                os._exit(int(isinstance(sys.stdout, Above)))
        assert os.waitpid(child, 0)[1] == 0
        live.stop()
    assert "from the child" in seen[0]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, True),
        ({"NO_COLOR": "1"}, True),
        ({"TERM": "dumb"}, False),
        ({"TTY_COMPATIBLE": "0"}, False),
    ],
)
def test_on_which_terminals_it_is_live(monkeypatch, environment, expected):
    with terminal(monkeypatch, **environment):
        assert can_be_live() is expected


def test_it_is_never_live_in_a_file(monkeypatch, tmp_path):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as continuous integration does
    with (tmp_path / "log").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert not can_be_live()
    assert not can_be_live(), "a closed stream is no terminal"
    monkeypatch.setattr(sys, "stdout", None)
    assert not can_be_live()


def test_a_stderr_that_goes_to_a_file_still_does(monkeypatch, tmp_path):
    with terminal(monkeypatch) as seen, (tmp_path / "log").open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        live = LiveTerminal(PANEL)
        live.start()
        print("into the file", file=sys.stderr)
        live.stop()
    assert (tmp_path / "log").read_text() == "into the file\n"
    assert "into the file" not in seen[0]


class Printed:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def print(self, line, **options) -> None:
        self.lines.append(line.plain)


@pytest.mark.parametrize(
    ("written", "lines", "left"),
    [
        (["a\nb", "c\n"], ["a", "bc"], []),
        (["\r 0%", "\r 50%", "\r100%\n"], ["100%"], []),
        (["\r 0%", "\r 50%"], [], [" 50%"]),
        (["one\r\ntwo\r\n"], ["one", "two"], []),
        (["bar\r", "       \r", "next\n"], ["next"], []),
        (["\n\n"], ["", ""], []),
        (["\x1b[31mred\x1b[0m\n"], ["red"], []),
    ],
)
def test_lines_as_a_terminal_would_show_them(written, lines, left):
    printed = Printed()
    above = Above(printed, sys.stderr)  # type: ignore[arg-type]
    for text in written:
        above.write(text)
    assert printed.lines == lines
    above.finish()
    assert printed.lines == lines + left


def test_a_question_is_shown_before_its_line_ends():
    printed = Printed()
    above = Above(printed, sys.stderr)  # type: ignore[arg-type]
    above.write("Go on? ")
    above.flush()
    above.write("\r 7%")
    above.flush()
    assert printed.lines == ["Go on? "]
