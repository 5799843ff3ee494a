"""Disk operations of checkpoints: flush, delete, checksum."""

from __future__ import annotations

import functools
import os
import shutil
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

# Small, because the allocator of each thread keeps what the thread has held once.
_BLOCK = 1 << 18
_THREADS = 8


def flush(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    if os.name == "nt":
        # Windows flushes only files open for writing.
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a folder, or the link alone if `path` is a link; ignore errors."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def checksums(paths: Sequence[Path]) -> list[str]:
    """Return the CRC-32 of each file, as hex digits; it detects damage and mix-ups, not forgery."""
    return list(readers().map(_checksum, paths))


@functools.cache
def readers() -> ThreadPoolExecutor:
    """Return the thread pool that reads files; the first call starts all its threads.

    A trainer's constructor makes that call: under a memory limit a thread's start can hang a save.
    """
    pool = ThreadPoolExecutor(_THREADS, "checksums")
    # Each thread gets exactly one task.
    together = threading.Barrier(_THREADS)
    list(pool.map(lambda _: together.wait(), range(_THREADS)))
    return pool


# A forked child has none of its parent's threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=readers.cache_clear)


def _checksum(path: Path) -> str:
    value, block = 0, memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            value = zlib.crc32(block[:count], value)
    return f"{value:08x}"
