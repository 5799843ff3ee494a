import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from trl_stppo.recipes.search.retrieval import BM25Retriever, Passage, words

PASSAGES = [
    Passage("merge", "merge is a function in module heapq. Merge sorted inputs."),
    Passage("DictReader", "DictReader is a class in module csv."),
    Passage("splitdrive", "splitdrive is a function in module os.path."),
    Passage("split_all", "split_all is a function in module shlex."),
]


@pytest.fixture(scope="module")
def retriever() -> BM25Retriever:
    pytest.importorskip("bm25s")
    return BM25Retriever(PASSAGES)


def test_words_keep_identifiers_and_split_dots() -> None:
    found = words("heapq.merge, DictReader(x) split_all!")
    assert found == ["heapq", "merge", "dictreader", "x", "split_all"]
    assert words("¿ — ?") == []


@pytest.mark.parametrize(
    ("query", "title"),
    [("heapq.merge", "merge"), ("What is DictReader?", "DictReader"), ("split_all", "split_all")],
)
def test_finds_the_passage_about_the_name(retriever: BM25Retriever, query: str, title: str) -> None:
    assert retriever.search(query, 2)[0].title == title


@pytest.mark.parametrize("query", ["zebra", "split", "", "   ", "?!"])
def test_nothing_known_finds_nothing(retriever: BM25Retriever, query: str) -> None:
    assert retriever.search(query, 3) == []


def test_top_k_limits_and_is_checked(retriever: BM25Retriever) -> None:
    assert len(retriever.search("function", 2)) == 2
    assert len(retriever.search("function", 50)) == 3
    with pytest.raises(ValueError, match="top_k is 0"):
        retriever.search("merge", 0)


def test_threads_get_the_answers_of_one_thread(retriever: BM25Retriever) -> None:
    queries = ["merge", "csv", "function", "module os.path", "zebra"] * 40
    alone = [retriever.search(query, 3) for query in queries]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda query: retriever.search(query, 3), queries)) == alone


def test_building_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bm25s")
    BM25Retriever(PASSAGES).search("merge", 1)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("passages", [[], [Passage("?", "...")]])
def test_a_corpus_without_words_is_refused(passages: list[Passage]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        BM25Retriever(passages)


def test_missing_bm25s_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ImportError, match=r"pip install bm25s"):
        BM25Retriever(PASSAGES)
