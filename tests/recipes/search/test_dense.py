"""Dense retrieval with a real faiss index and an encoder that hashes words."""

import hashlib
from pathlib import Path

import pytest

from tests.kit.script_kit import scripts

np = pytest.importorskip("numpy")

with scripts():
    from search_env.retrieval import Passage, Retriever
    from search_index import DenseIndex, DenseSettings, build_dense

PASSAGES = [
    Passage("Heap", "a heap is a tree"), Passage("Queue", "first in first out"),
    Passage("", "a tree has leaves"), Passage("Twin", "same text"), Passage("Twin", "same text"),
]  # fmt: skip
SETTINGS = DenseSettings("hash")


class HashEncoder:
    """Counts words in buckets; the first bucket says how the text began."""

    def __init__(self, size: int = 64) -> None:
        self.size = size
        self.seen: list[str] = []

    def __call__(self, texts: list[str]):
        self.seen += texts
        vectors = np.zeros((len(texts), self.size))
        for row, text in zip(vectors, texts, strict=True):
            for word in text.lower().replace("query: ", "").replace("passage: ", "").split():
                row[int(hashlib.sha256(word.encode()).hexdigest(), 16) % self.size] += 1
        return vectors


@pytest.fixture
def folder(tmp_path) -> Path:
    pytest.importorskip("faiss")
    build_dense(PASSAGES, tmp_path / "x", SETTINGS, encode=HashEncoder(), batch_size=2)
    return tmp_path / "x"


def test_the_nearest_passage_comes_first(folder) -> None:
    index = DenseIndex(folder, encode=HashEncoder())
    assert isinstance(index, Retriever)
    assert len(index) == 5
    assert index.search("tree heap", 1) == [PASSAGES[0]]
    assert index.search("leaves", 1) == [PASSAGES[2]]
    (first, similarity), *rest = index.ranked("first in first out queue", 9)
    assert (first, similarity) == (PASSAGES[1], pytest.approx(1.0))
    assert len(rest) == 4
    scores = [score for _, score in rest]
    assert scores == sorted(scores, reverse=True)
