"""BM25 with a memory-mapped index on disk, built from a stream of passages in bounded memory.

Opening an index loads only the vocabulary. The index has the format of bm25s, whose own builder needs all
tokens in memory. Here passages are counted block by block, and the blocks, each sorted by term, are
scattered into memory-mapped arrays. Only the vocabulary, and 16 bytes per passage, grow with the corpus.
"""

import errno
import math
import os
import re
import unicodedata
from array import array
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from search_env.retrieval import Passage, best, import_bm25s

from .corpus import PassageStore, PassageWriter
from .folders import new_folder, read_manifest, write_manifest
from .ranking import RankingRetriever

KIND = "bm25"
STOP_WORDS = ("english", "none")
_WORD = re.compile(r"\w+")


def terms_of(text: str, stopped: frozenset[str]) -> list[str]:
    """Split a text into lower-case words of any script, without accents and stop words; no stemming."""
    if not text.isascii():
        decomposed = unicodedata.normalize("NFKD", text)
        text = "".join(c for c in decomposed if not unicodedata.combining(c))
    found = _WORD.findall(text.lower())
    return [word for word in found if word not in stopped] if stopped else found


def stop_words(name: str) -> frozenset[str]:
    """Return the stop words of the list `name`, "english" or "none"."""
    if name not in STOP_WORDS:
        raise ValueError(f"stop_words is {name!r}; allowed are {STOP_WORDS}.")
    import_bm25s()
    from bm25s.stopwords import STOPWORDS_EN

    return frozenset(STOPWORDS_EN if name == "english" else ())


class BM25Index(RankingRetriever):
    """Retriever with a BM25 index that `build_bm25` wrote to a folder. Deterministic, thread-safe.

    bm25s scores every passage that has a word of the query; a search needs 4 bytes per passage of the
    corpus, and about 20 if most passages have one.
    """

    def __init__(self, folder: str | Path) -> None:
        """Open the index in `folder`. Raise `IndexFolderError` if the index is not complete."""
        self.folder = Path(folder)
        self.settings = read_manifest(self.folder, KIND)
        self._stopped = stop_words(self.settings["stop_words"])
        self._index: Any = import_bm25s().BM25.load(self.folder, mmap=True, show_progress=False)
        for name in ("data", "indices", "indptr"):
            # Still mapped, but faster to slice than a memmap.
            self._index.scores[name] = np.asarray(self._index.scores[name])
        self._passages = PassageStore(self.folder)

    def __len__(self) -> int:
        return len(self._passages)

    def _ranked(self, query: str, top_k: int) -> list[tuple[Passage, float]]:
        known = self._index.get_tokens_ids(terms_of(query, self._stopped))
        if not known:
            return []
        found = best(self._index.get_scores(known), top_k)
        return [(self._passages[place], score) for place, score in found]


def build_bm25(
    passages: Iterable[Passage],
    folder: str | Path,
    *,
    k1: float = 0.9,
    b: float = 0.4,
    stop_words_name: str = "english",
    block_tokens: int = 10_000_000,
) -> int:
    """Build a BM25 index in a folder, for `BM25Index`.

    Args:
        passages: the corpus, read once.
        folder: of the index; it must be new or empty, and is there only when complete.
        k1: saturation of the term frequency, >= 0. The defaults are Anserini's for passages.
        b: length normalisation, in [0, 1].
        stop_words_name: "english" drops 33 frequent words, "none" drops none.
        block_tokens: words per block, >= 1; ten million need about 400 MB. Larger blocks are faster
            for a corpus that exceeds the page cache.

    Returns:
        The number of passages.
    """
    for name, value, high in (("k1", k1, math.inf), ("b", b, 1.0)):
        if not 0 <= value <= high:
            raise ValueError(f"{name} is {value}; allowed are 0 to {high}.")
    if block_tokens < 1:
        raise ValueError(f"block_tokens is {block_tokens}; must be >= 1.")
    stopped = stop_words(stop_words_name)
    with new_folder(folder) as building:
        writer = PassageWriter(building)
        with TemporaryDirectory(dir=building) as scratch:
            counts = _Counts(Path(scratch), block_tokens)
            for passage in passages:
                writer.add(passage)
                counts.add(terms_of(f"{passage.title} {passage.text}", stopped))
            counts.flush()
            writer.close()
            if not counts.vocabulary:
                raise ValueError(f"the corpus has {len(writer)} passages without an indexed word.")
            _save(counts, building, Path(scratch), k1, b)
        settings = {"stop_words": stop_words_name, "k1": k1, "b": b, "passages": len(writer)}
        write_manifest(building, KIND, settings)
    return len(writer)


class _Counts:
    """Counts of terms per passage, saved block by block as keys (term << 32 | passage) and counts."""

    def __init__(self, scratch: Path, block_tokens: int) -> None:
        self.vocabulary: defaultdict[str, int] = defaultdict()
        self.vocabulary.default_factory = self.vocabulary.__len__
        self.lengths = array("i")
        self.blocks: list[tuple[Path, Path]] = []
        self._scratch, self._block_tokens = scratch, block_tokens
        self._terms, self._first = array("i"), 0

    def add(self, terms: list[str]) -> None:
        """Count the terms of the next passage."""
        self._terms.extend(map(self.vocabulary.__getitem__, terms))
        self.lengths.append(len(terms))
        if len(self._terms) >= self._block_tokens:
            self.flush()

    def flush(self) -> None:
        """Sort the current block by term and passage, and write its keys and counts to files."""
        lengths = np.array(self.lengths[self._first :], dtype=np.int64)
        keys = np.array(self._terms, dtype=np.int64) << 32
        keys |= np.repeat(np.arange(self._first, self._first + len(lengths)), lengths)
        keys.sort()
        starts = np.flatnonzero(np.diff(keys, prepend=-1))
        block = self._scratch / str(len(self.blocks))
        paths = block.with_suffix(".keys.npy"), block.with_suffix(".counts.npy")
        np.save(paths[0], keys[starts])
        np.save(paths[1], np.diff(starts, append=len(keys)).astype(np.int32))
        self.blocks.append(paths)
        self._terms, self._first = array("i"), len(self.lengths)


def _save(counts: _Counts, folder: Path, scratch: Path, k1: float, b: float) -> None:
    """Compute BM25 scores (Lucene's) from the counts. Save them sorted by term, then by passage."""
    size = len(counts.vocabulary)
    frequency = np.zeros(size, dtype=np.int64)
    for keys, _ in counts.blocks:
        frequency += np.bincount(np.load(keys) >> 32, minlength=size)
    total = len(counts.lengths)
    idf = np.log(1 + (total - frequency + 0.5) / (frequency + 0.5))
    lengths = np.frombuffer(counts.lengths, dtype=np.int32)
    penalty = k1 * ((1 - b) + b * lengths / lengths.mean())
    starts = np.concatenate([[0], np.cumsum(frequency)])
    shape = (int(starts[-1]),)
    data = _mapped(scratch / "data.npy", np.float32, shape)
    indices = _mapped(scratch / "indices.npy", np.int32, shape)
    heads = starts[:-1].copy()
    for keys_path, counts_path in counts.blocks:
        keys, often = np.load(keys_path), np.load(counts_path)
        terms, passages = keys >> 32, (keys & 0xFFFFFFFF).astype(np.int32)
        scores = (idf[terms] * often / (penalty[passages] + often)).astype(np.float32)
        runs = np.flatnonzero(np.diff(terms, prepend=-1))
        run_lengths = np.diff(runs, append=len(terms))
        named = terms[runs]
        places = np.arange(len(terms)) + np.repeat(heads[named] - runs, run_lengths)
        data[places], indices[places] = scores, passages
        heads[named] += run_lengths
    index = import_bm25s().BM25(k1=k1, b=b)
    index.scores = {"data": data, "indices": indices, "indptr": starts, "num_docs": total}
    index.vocab_dict = dict(counts.vocabulary)
    index.nonoccurrence_array = None
    index.save(folder, show_progress=False)


def _mapped(path: Path, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Create a memory-mapped array whose disk space is reserved.

    On a full disk, writing to a mapped hole of a sparse file would kill the process.
    """
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    if not hasattr(os, "posix_fallocate"):
        return array
    size = path.stat().st_size
    try:
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        # Some file systems have no such call.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            what = f"{os.strerror(error.errno or 0)}: {size:,} bytes cannot be reserved"
            raise OSError(error.errno, what, str(path)) from error
    return array
