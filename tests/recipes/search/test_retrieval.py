from concurrent.futures import ThreadPoolExecutor

import pytest

from scripts.search.search_env.retrieval import BM25Retriever, Passage

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


def test_threads_get_the_answers_of_one_thread(retriever: BM25Retriever) -> None:
    queries = ["merge", "csv", "function", "module os.path", "zebra"] * 40
    alone = [retriever.search(query, 3) for query in queries]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda query: retriever.search(query, 3), queries)) == alone
