"""Dense retrieval: an encoder's vectors in a faiss index.

It needs `pip install 'faiss-cpu>=1.9'`, and `'sentence-transformers>=3'` for encoders by name.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from search_env.retrieval import Passage

from .corpus import PassageStore, PassageWriter
from .folders import IndexFolderError, new_folder, read_manifest, write_manifest
from .ranking import RankingRetriever

KIND = "dense"
VECTORS, PROBE = "vectors.faiss", "probe.npy"
# Cosine: the same model in another precision or on other hardware is above, other models are below.
_SAME_ENCODER = 0.99
_PROBE_TEXT = "Who wrote the first book about the city by the sea?"

Encode = Callable[[list[str]], Any]


@dataclass(frozen=True)
class DenseSettings:
    """Settings of the encoder, for building and searching an index.

    Attributes:
        encoder: name of the encoder; a sentence-transformers model unless a callable is passed.
        query_prefix, passage_prefix: put before each text; the defaults are those of E5.
        normalize: scale vectors to length 1, so that similarity is the cosine.
    """

    encoder: str = "intfloat/e5-base-v2"
    query_prefix: str = "query: "
    passage_prefix: str = "passage: "
    normalize: bool = True


def build_dense(
    passages: Iterable[Passage],
    folder: str | Path,
    settings: DenseSettings,
    *,
    encode: Encode | None = None,
    factory: str = "Flat",
    batch_size: int = 256,
    train_passages: int = 100_000,
) -> int:
    """Build a dense index in a folder, for `DenseIndex`.

    Args:
        passages: the corpus, read once.
        folder: of the index; it must be new or empty, and is there only when complete.
        settings: encoder and prefixes, saved with the index.
        encode: texts -> one vector each; None loads `settings.encoder`.
        factory: faiss's description of the index: "Flat" is exact, "IVF4096,PQ64" small.
        batch_size: passages per call of the encoder, >= 1.
        train_passages: number of first passages for the training of an index that needs it.

    Returns:
        The number of passages.
    """
    faiss = _import_faiss()
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; must be >= 1.")
    encoder = _Encoder(settings, encode)
    with new_folder(folder) as building:
        writer = PassageWriter(building)
        index, waiting = None, []
        for texts in _batches(passages, writer, batch_size):
            vectors = encoder.passages(texts)
            if index is None:
                index = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
            waiting.append(vectors)
            if index.is_trained or sum(map(len, waiting)) >= train_passages:
                _add(index, waiting)
        if index is None:
            raise ValueError("the corpus has no passages; at least one is needed.")
        _add(index, waiting)
        writer.close()
        faiss.write_index(index, str(building / VECTORS))
        np.save(building / PROBE, encoder.queries([_PROBE_TEXT])[0])
        made = {**asdict(settings), "factory": factory, "passages": len(writer)}
        write_manifest(building, KIND, made)
    return len(writer)


class DenseIndex(RankingRetriever):
    """Retriever with a dense index of `build_dense`. Thread-safe: a lock guards the encoder."""

    def __init__(self, folder: str | Path, *, encode: Encode | None = None) -> None:
        """Open the index. Raise `IndexFolderError` if another encoder has built the index.

        Args:
            folder: of the index.
            encode: texts -> one vector each; None loads the encoder that the folder names.

        Raises:
            IndexFolderError: no complete index of this kind, or one of another encoder.
        """
        faiss = _import_faiss()
        self.folder = Path(folder)
        made = read_manifest(self.folder, KIND)
        self.settings = DenseSettings(**{name: made[name] for name in asdict(DenseSettings())})
        self._encoder = _Encoder(self.settings, encode)
        self._index: Any = faiss.read_index(str(self.folder / VECTORS))
        self._passages = PassageStore(self.folder)
        self._check_encoder()

    def __len__(self) -> int:
        return len(self._passages)

    def _ranked(self, query: str, top_k: int) -> list[tuple[Passage, float]]:
        vectors, most = self._encoder.queries([query]), min(top_k, len(self._passages))
        scores, numbers = self._index.search(vectors, most)
        order = np.lexsort((numbers[0], -scores[0]))
        found = zip(numbers[0][order].tolist(), scores[0][order].tolist(), strict=True)
        # -1: an approximate index has searched too few passages.
        return [(self._passages[number], score) for number, score in found if number >= 0]

    def _check_encoder(self) -> None:
        expected = np.load(self.folder / PROBE)
        found = self._encoder.queries([_PROBE_TEXT])[0]
        lengths = np.linalg.norm(expected) * np.linalg.norm(found)
        same = found.shape == expected.shape and lengths > 0
        cosine = float(found @ expected / lengths) if same else 0.0
        if cosine < _SAME_ENCODER:
            raise IndexFolderError(
                f"{self.settings.encoder!r} is not the encoder of {self.folder}: the cosine is {cosine:.3f}."
            )


class _Encoder:
    """Encoder of texts as float32 vectors. A lock allows one call at a time."""

    def __init__(self, settings: DenseSettings, encode: Encode | None) -> None:
        self._settings = settings
        self._encode = encode or _sentence_encoder(settings.encoder)
        self._lock = threading.Lock()

    def queries(self, texts: list[str]) -> Any:
        return self._vectors([f"{self._settings.query_prefix}{text}" for text in texts])

    def passages(self, texts: list[str]) -> Any:
        return self._vectors([f"{self._settings.passage_prefix}{text}" for text in texts])

    def _vectors(self, texts: list[str]) -> Any:
        with self._lock:
            result = self._encode(texts)
        vectors = np.ascontiguousarray(np.asarray(result, dtype=np.float32))
        if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
            raise ValueError(
                f"the encoder returned shape {vectors.shape} for {len(texts)} texts; must be finite rows."
            )
        if self._settings.normalize:
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return vectors


def _batches(passages: Iterable[Passage], writer: PassageWriter, size: int) -> Iterator[list[str]]:
    """Write the passages to disk, and yield their texts in batches for the encoder."""
    stream = iter(passages)
    while batch := list(islice(stream, size)):
        for passage in batch:
            writer.add(passage)
        yield [f"{p.title}\n{p.text}" if p.title else p.text for p in batch]


def _add(index: Any, waiting: list[Any]) -> None:
    """Add the vectors to the faiss index, and train the index first if necessary."""
    if waiting:
        vectors = np.concatenate(waiting)
        if not index.is_trained:
            index.train(vectors)
        index.add(vectors)
        waiting.clear()


def _import_faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ImportError("dense retrieval needs faiss: pip install faiss-cpu.") from error
    return faiss


def _sentence_encoder(name: str) -> Encode:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ImportError(
            f"the encoder {name!r} needs sentence-transformers: pip install sentence-transformers."
        ) from error
    model = SentenceTransformer(name)
    return lambda texts: model.encode(texts, show_progress_bar=False, convert_to_numpy=True)
