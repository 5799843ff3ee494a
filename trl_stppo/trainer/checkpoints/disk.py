"""What checkpoints ask of a disk: to flush, to delete, to be read again, and to say why it refuses."""

from __future__ import annotations

import errno
import functools
import os
import re
import shutil
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

_BLOCK = 1 << 22
_THREADS = 8
_ROOM = (errno.ENOSPC, errno.EDQUOT)
_REMEDIES = {
    **dict.fromkeys(_ROOM, "Make room (or set save_total_limit)"),
    errno.EROFS: "That disk is read-only: have it mounted for writing, or move the run to another one",
    errno.EFBIG: "No file may become that large there: raise the limit (`ulimit -f`, or the file "
    "system's), or move the run to another disk",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "Let this process write there"),
}


def flush(path: Path) -> None:
    """Have the system write a file, or a folder's entries, to the disk."""
    if os.name == "nt":
        return  # Windows flushes only what is open for writing
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Delete a folder as far as that goes; of a link the link, not what it leads to."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def checksums(paths: Sequence[Path]) -> list[str]:
    """CRC-32 of each file, as hex digits.

    It is to find what disks, copies and mix-ups do, and nobody who forges. One core reads 1.4 GB/s with
    it, less than 0.6 with SHA-256 and 0.3 with BLAKE2b; several files are read at once.
    """
    return list(readers().map(_checksum, paths))


@functools.cache
def readers() -> ThreadPoolExecutor:
    """The threads that read files, all of them started by the first call.

    A trainer's constructor makes that call: under a memory limit a start can hang, and a save must not.
    """
    pool = ThreadPoolExecutor(_THREADS, "checksums")
    together = threading.Barrier(_THREADS)  # each waits for the others, so that none does two tasks
    list(pool.map(lambda _: together.wait(), range(_THREADS)))
    return pool


if hasattr(os, "register_at_fork"):  # a forked child has none of its parent's threads
    os.register_at_fork(after_in_child=readers.cache_clear)


def _checksum(path: Path) -> str:
    value = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return f"{value:08x}"


def refusal(error: BaseException, place: Path, spoilt: Path | None = None) -> tuple[str, str]:
    """Why something could not be written, and what to do about it.

    Args:
        error: that came of it. Neither torch nor safetensors raises an OSError.
        place: folder that was to be written to.
        spoilt: folder with what was written, which nobody needs any more.
    """
    code = _errno(error)
    if code is None and spoilt is not None:
        code = _errno_of_more(spoilt)
    why = f"{type(error).__name__}: {error}"
    if code is not None and os.strerror(code) not in why:
        why += f" ({os.strerror(code)})"
    if code in _ROOM:
        there = next(path for path in (place, *place.absolute().parents) if path.exists())
        why += f"; {shutil.disk_usage(there).free / 2**30:.2f} GiB are free there"
    return why, _REMEDIES.get(code or 0, "Mend the cause")


def _errno(error: BaseException | None) -> int | None:
    """Its number, or that of what it came of; safetensors has it in its text."""
    while error is not None:
        said = re.search(r"os error (\d+)", str(error))
        code = int(said.group(1)) if said else getattr(error, "errno", None)
        if code is not None:
            return int(code)
        error = error.__cause__ or error.__context__
    return None


def _errno_of_more(folder: Path) -> int | None:
    """What the disk says to a little more of the largest file."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    if files:
        try:
            with max(files, key=lambda path: path.stat().st_size).open("ab") as file:
                file.write(bytes(1 << 20))
        except OSError as error:
            return error.errno
    return None
