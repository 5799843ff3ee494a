"""The records of a study: a compressed line of JSON per finished cell, appended as the cell ends."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _plan import HERE, Cell, Key

Record = dict[str, Any]
FOLDER = HERE / "records"


def key_of(record: Record) -> Key:
    """Identity of a record's run."""
    return record["task"], record["arm"], record["setting"], record["seed"]


class Records:
    """A file of records.

    Args:
        path: .jsonl.gz, made by the first `add`. A torn end, which a killed process leaves, is not read.

    Attributes:
        rows: all records, in their order.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, list[Record]()
        self._read()

    def _read(self) -> int:
        """Read all records; return the number of bytes that they take."""
        data, whole = self.path.read_bytes() if self.path.is_file() else b"", 0
        self.rows = []
        while whole < len(data):
            # Each `add` has written a gzip member of its own.
            member = zlib.decompressobj(wbits=31)
            try:
                text = member.decompress(data[whole:])
            except zlib.error:
                break
            if not member.eof:
                break
            self.rows += map(json.loads, text.splitlines())
            whole = len(data) - len(member.unused_data)
        return whole

    @contextmanager
    def writing(self) -> Iterator[Records]:
        """Hold the file for one process, and move its torn end, if it has one, into a file aside.

        Raises:
            BlockingIOError: another process holds it.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BlockingIOError(f"{self.path}: another process writes it.") from error
            whole = self._read()
            if torn := self.path.read_bytes()[whole:]:
                self.path.with_name(f"{self.path.name}.torn").write_bytes(torn)
                os.truncate(self.path, whole)
            try:
                yield self
            finally:
                if not self.rows:
                    self.path.unlink()

    def add(self, record: Record) -> None:
        """Append a record; it is on the disk when this returns."""
        with open(self.path, "ab") as file:
            file.write(gzip.compress(json.dumps(record).encode() + b"\n", mtime=0))
            file.flush()
            os.fsync(file.fileno())
        self.rows.append(record)

    def missing(self, cells: tuple[Cell, ...]) -> list[Cell]:
        """Return the cells without a record.

        Raises:
            ValueError: a cell has run with other overrides.
        """
        ran = {key_of(row): row["overrides"] for row in self.rows}
        for cell in cells:
            if (before := ran.get(cell.key, cell.overrides)) != cell.overrides:
                raise ValueError(
                    f"{cell.key}: `overrides={cell.overrides}`, but its record has {before}. Rename the arm "
                    f"or the setting."
                )
        return [cell for cell in cells if cell.key not in ran]
