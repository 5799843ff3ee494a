"""BM25 from disk: the same scores as bm25s, ties in order, bounded building, damaged folders."""

import errno
import os
import random
import shutil
from pathlib import Path

import pytest

from tests.kit.script_kit import scripts

bm25s = pytest.importorskip("bm25s")
np = pytest.importorskip("numpy")

with scripts():
    from search_env.retrieval import Passage, best
    from search_index import BM25Index, IndexFolderError, build_bm25
    from search_index.bm25 import _mapped, terms_of

PASSAGES = [
    Passage("Heap queue", "A heap is a tree. The smallest item is at the root."),
    Passage("Beyoncé", "An American singer; born in Houston.\nSecond line."),
    Passage("", "東京 is the capital of Japan."),
    Passage("Empty", ""),
    Passage("", ""),
]


def zipf(count: int, seed: int = 0) -> list[Passage]:
    """Passages in which few words are everywhere and many are rare, with repetitions."""
    dice = random.Random(seed)
    words = [f"w{i}" for i in range(400)]
    weights = [1 / (i + 1) for i in range(400)]
    return [
        Passage(f"t{dice.randrange(50)}", " ".join(dice.choices(words, weights, k=dice.randrange(30))))
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bm25") / "large"
    passages = zipf(1500)
    assert build_bm25(passages, folder, block_tokens=4000, stop_words_name="none") == 1500
    return passages, BM25Index(folder)


@pytest.fixture
def small(tmp_path) -> Path:
    build_bm25(PASSAGES, tmp_path / "small")
    return tmp_path / "small"


@pytest.mark.long
def test_it_scores_and_ranks_as_bm25s_does(large) -> None:
    passages, index = large
    reference = bm25s.BM25(k1=0.9, b=0.4)
    tokens = [terms_of(f"{p.title} {p.text}", frozenset()) for p in passages]
    reference.index(tokens, show_progress=False)
    dice = random.Random(1)
    for number in range(300):
        # Frequent words alone, rare ones alone, both, and words that come twice.
        ranks = [dice.choice([dice.randrange(5), dice.randrange(400)]) for _ in range(number % 7 + 1)]
        query = [f"w{rank}" for rank in ranks]
        scores = reference.get_scores(query)
        k = dice.choice([1, 3, 10, 2000])
        expected = np.lexsort((np.arange(len(scores)), -scores))[: min(k, (scores > 0).sum())]
        found = index.ranked(" ".join(query), k)
        assert [s for _, s in found] == pytest.approx(scores[expected].tolist(), rel=1e-5)
        gaps = np.abs(np.diff(scores[expected]))
        if len(expected) < 2 or gaps.min() > 1e-4:
            boundary = np.sort(scores)[::-1][len(expected) - 1 : len(expected) + 1]
            if len(boundary) < 2 or boundary[0] - boundary[1] > 1e-4:
                assert [p for p, _ in found] == [passages[i] for i in expected]


def test_the_best_are_those_of_a_stable_sort() -> None:
    dice = np.random.default_rng(0)
    for number in range(300):
        # Few values, so that there are ties, also across the border.
        scores = dice.integers(0, 4, size=dice.integers(1, 60)).astype(np.float32)
        top_k = int(dice.integers(1, 70))
        order = (-scores).argsort(kind="stable")[:top_k]
        expected = [(int(place), float(scores[place])) for place in order if scores[place] > 0]
        assert best(scores, top_k) == expected, number


def test_blocks_make_no_difference(tmp_path, large) -> None:
    passages, index = large
    build_bm25(passages, tmp_path / "one", stop_words_name="none")
    for name in os.listdir(tmp_path / "one"):
        if name != "index.json":
            assert (tmp_path / "one" / name).read_bytes() == (index.folder / name).read_bytes(), name


@pytest.mark.parametrize("spoil", [
    lambda f: (f / "index.json").unlink(),
    lambda f: (f / "index.json").write_text("{"),
    lambda f: (f / "data.csc.index.npy").unlink(),
    lambda f: os.truncate(f / "passages.jsonl", 20),
    lambda f: (f / "index.json").write_text(
        (f / "index.json").read_text().replace('"bm25"', '"dense"')
    ),
    lambda f: shutil.rmtree(f),
])  # fmt: skip
def test_a_damaged_folder_is_refused(small, spoil) -> None:
    spoil(small)
    with pytest.raises(IndexFolderError, match="small"):
        BM25Index(small)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="not on this system")
def test_a_full_disk_is_an_error_before_anything_is_mapped(tmp_path, monkeypatch) -> None:
    """Writing to a hole of a mapped file would end the process with SIGBUS."""
    mapped = _mapped(tmp_path / "x.npy", np.int32, (300_000,))
    assert len(mapped) == 300_000
    assert (tmp_path / "x.npy").stat().st_blocks * 512 >= 1_200_000
    (tmp_path / "x.npy").unlink()

    def full(file, start, size):
        raise OSError(errno.ENOSPC, "what the system says")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"bytes cannot be reserved.*data\.npy"):
        build_bm25(PASSAGES, tmp_path / "x")
    assert os.listdir(tmp_path) == []

    def unable(file, start, size):
        raise OSError(errno.EOPNOTSUPP, "no such thing here")

    monkeypatch.setattr(os, "posix_fallocate", unable)
    assert build_bm25(PASSAGES, tmp_path / "x") == 5
