"""A lock of the operating system that allows one run at a time in an output directory."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from ...errors import CheckpointWriteError, RunLockError

logger = logging.getLogger(__name__)

# Upstream does not upload names that begin with an underscore.
NAME = "_running.json"
# Seconds for a killed process to close its files.
DYING = 2.0
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class RunLock:
    """File lock on an output directory, released at the latest when the process ends."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._lock = FileLock(self._path, thread_local=False, fallback_to_soft=False)

    def take(self) -> None:
        """Acquire the lock, or raise RunLockError; on a disk without file locks, only warn."""
        folder = self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire(timeout=DYING)
            except Timeout:
                raise self._refused() from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                logger.warning(
                    "`output_dir=%r` lies on a disk without file locks (%s): start no second run there.",
                    str(folder), error,
                )  # fmt: skip
                return
            since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
            self._path.write_text(json.dumps(holder), encoding="utf-8")
        except OSError as error:
            self.release()
            raise CheckpointWriteError(
                f"`output_dir={str(folder)!r}` cannot be written to: {type(error).__name__}: {error}."
            ) from error

    def release(self) -> None:
        """Release the lock if it is held."""
        if self._lock.is_locked:
            with suppress(OSError):
                self._path.unlink()
            self._lock.release()

    def _refused(self) -> RunLockError:
        other = {"host": "unknown", "pid": "unknown", "since": "a moment ago"}
        with suppress(OSError, ValueError):
            other |= json.loads(self._path.read_text(encoding="utf-8"))
        return RunLockError(
            f"`output_dir={str(self._path.parent)!r}` belongs to a run on host {other['host']}, process "
            f"{other['pid']}, since {other['since']}. End it, or set another output_dir."
        )
