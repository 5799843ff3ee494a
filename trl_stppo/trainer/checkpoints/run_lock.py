"""One run at a time in an output directory, also on a disk that several machines share.

Who trains keeps a file there, and touches it every second. Locks of the operating system would end with
their process, but are unknown to some shared disks and a matter of one machine on others. Nor are clocks
compared, which differ: on its own machine a run asks for the process; on another one it watches for some
seconds whether the file is touched. One that a crash has left behind is taken over.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...errors import CheckpointWriteError, RunLockError
from ...threads import DaemonThread
from . import disk

NAME = "_running.json"  # upstream leaves out of an upload what begins with an underscore
BEAT_SECONDS = 1.0
WATCH_SECONDS = 6.0


class RunLock:
    """The right to write to an output directory."""

    def __init__(self, folder: Path) -> None:
        self._path, self._name = folder / NAME, uuid.uuid4().hex
        self._ended = threading.Event()
        self._beat = DaemonThread(self._keep_touching, "run lock")

    def take(self) -> None:
        """Take it, from a run that has crashed if need be; what goes wrong changes nothing.

        Raises:
            RunLockError: another run has it.
            CheckpointWriteError: nothing can be written there.
            ThreadStartError: memory is so limited that no thread starts.
        """
        self._beat.start()  # first: a file without it would outlive a failure
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            while not self._is_written():
                self._clear_away(_read(self._path))
        except OSError as error:
            why, remedy = disk.refusal(error, self._path.parent)
            raise CheckpointWriteError(
                f"`output_dir={str(self._path.parent)!r}` cannot be written to: {why}. {remedy}, or set "
                f"another output_dir."
            ) from error

    def check(self) -> None:
        """Raise a RunLockError where another run has taken over, as from one that was suspended."""
        if _read(self._path).get("run", self._name) != self._name:
            raise self._refused(
                f"It has taken over from this run, which showed no sign of life for more than "
                f"{WATCH_SECONDS:.0f} seconds, and now ends without a checkpoint."
            )

    def release(self) -> None:
        """Give it back; without having it, nothing happens."""
        self._ended.set()
        if self._beat.ident is not None:
            self._beat.join()
            if _read(self._path).get("run") == self._name:
                with suppress(OSError):
                    self._path.unlink()

    def _is_written(self) -> bool:
        """Make the file; False where there is one."""
        own = {"host": socket.gethostname(), "pid": os.getpid(), "began": _began(os.getpid())}
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        try:
            with self._path.open("x", encoding="utf-8") as file:
                json.dump({"run": self._name, **own, "machine": _machine(), "since": since}, file)
        except FileExistsError:
            return False
        except OSError:
            with suppress(OSError):
                self._path.unlink()
            raise
        return True

    def _clear_away(self, other: dict[str, Any]) -> None:
        """Remove what a crash has left behind; only one of several that try comes to do it."""
        if _is_alive(self._path, other):
            raise self._refused(
                "Two runs in one folder would delete each other's checkpoints. Wait until it has ended, "
                "end it, or set another output_dir."
            )
        aside = self._path.with_name(f"{NAME}.{self._name}")
        with suppress(FileNotFoundError):
            os.replace(self._path, aside)
            if _read(aside) != other:  # somebody was faster, and this is theirs
                os.replace(aside, self._path)
            aside.unlink(missing_ok=True)

    def _refused(self, what: str) -> RunLockError:
        other = {"host": "unknown", "pid": "unknown", "since": "a moment ago"} | _read(self._path)
        return RunLockError(
            f"`output_dir={str(self._path.parent)!r}` belongs to a run on host {other['host']}, process "
            f"{other['pid']}, since {other['since']}. {what}"
        )

    def _keep_touching(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(OSError):
                if _read(self._path).get("run") == self._name:
                    os.utime(self._path)


def _read(path: Path) -> dict[str, Any]:
    """What a lock says; nothing where it is gone, or not written yet."""
    with suppress(OSError, ValueError):
        about = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(about, dict):
            return about
    return {}


def _is_alive(path: Path, other: dict[str, Any]) -> bool:
    """Whether the run that has the lock goes on."""
    mine = other.get("pid") == os.getpid()  # of another trainer, or one that could not give it back
    machine = _machine()
    if machine is not None and other.get("machine") == machine and not mine:
        return other.get("began") is not None and _began(other["pid"]) == other["began"]
    with suppress(FileNotFoundError):  # given back meanwhile
        first, end = _touched(path), time.monotonic() + WATCH_SECONDS
        while time.monotonic() < end:
            time.sleep(BEAT_SECONDS / 5)
            if _touched(path) != first:
                return True
    return False


def _touched(path: Path) -> tuple[int, int, int]:
    """Differs once a file is touched, by the disk's clock; opened, as NFS remembers what it was."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
    return status.st_ino, status.st_size, status.st_mtime_ns


def _machine() -> str | None:
    """What process numbers are unique in: one boot, one container; None where nothing says."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return None


def _began(pid: int) -> str | None:
    """When a process was started, in ticks since the boot; None where it has ended."""
    with suppress(OSError, IndexError):
        state, *fields = (
            Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        )
        return None if state in "ZX" else fields[18]
    return None
