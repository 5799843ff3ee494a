"""Read corpus files, and store passages on disk."""

import gzip
import json
import mmap
import zlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from search_env.retrieval import Passage, passage_of

TEXTS, OFFSETS = "passages.jsonl", "offsets.npy"


def read_corpus(path: str | Path) -> Iterator[Passage]:
    """Yield the passages of a JSONL file (or .jsonl.gz). Blank lines are skipped."""
    opener: Any = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "rb") as lines:
        for number, line in enumerate(_undamaged(lines, path), start=1):
            if line.strip():
                try:
                    yield passage_of(json.loads(line))
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error


def _undamaged(lines: Iterable[bytes], path: str | Path) -> Iterator[bytes]:
    """Yield the lines. Raise a ValueError with the line's number if a compressed file is damaged."""
    read = 0
    try:
        for line in lines:
            yield line
            read += 1
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path}, after line {read}: the compressed file is damaged or cut off ({error})."
        ) from error


class PassageWriter:
    """Writer of passages into a folder that a `PassageStore` reads."""

    def __init__(self, folder: Path) -> None:
        """Open the passage file in `folder`. The folder is complete after `close`."""
        self._folder = folder
        # `close` closes the file.
        self._file: IO[bytes] = open(folder / TEXTS, "wb")  # noqa: SIM115
        self._ends = array("q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def add(self, passage: Passage) -> None:
        """Append one passage."""
        line = json.dumps([passage.title, passage.text], ensure_ascii=False)
        # UTF-8 has no lone surrogates, which undecodable input leaves.
        written = self._file.write(line.encode("utf-8", "replace") + b"\n")
        self._ends.append(self._ends[-1] + written)

    def close(self) -> None:
        """Close the passage file, and write the offsets of the passages."""
        self._file.close()
        np.save(self._folder / OFFSETS, np.frombuffer(self._ends, dtype=np.int64))


class PassageStore:
    """Passages by number, read from a memory-mapped file. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Map the files of a folder that a `PassageWriter` completed."""
        self._offsets: Any = np.load(folder / OFFSETS, mmap_mode="r")
        with open(folder / TEXTS, "rb") as file:
            self._texts = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> Passage:
        start, end = self._offsets[number : number + 2].tolist()
        title, text = json.loads(self._texts[start:end])
        return Passage(title, text)
