"""The HTTP retriever against a server that fails in every way a server can."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from scripts.search.search_env.retrieval import HttpRetriever, Passage, RetrievalError
from tests.kit.faulty_server import faulty_server
from tests.kit.waiting import PATIENCE

BROKEN = ("500", "reset", "garbage", "503", "429", "close", "cut", "shape")
HITS = [Passage("q", "passage 0"), Passage("q", "passage 1")]


def client(server, **settings) -> HttpRetriever:
    return HttpRetriever(server.url, **{"timeout": PATIENCE, "backoff": 0.01, **settings})


@pytest.mark.parametrize("fault", [*BROKEN, "hang"])
def test_a_failure_is_asked_again(fault) -> None:
    with faulty_server(fault, fault) as server:
        assert client(server, timeout=0.2 if fault == "hang" else PATIENCE).search("q", 2) == HITS
        assert len(server.requests) >= 3


@pytest.mark.parametrize("status", ["400", "404", "422", "302"])
def test_a_refusal_is_not_repeated_and_not_kept(status) -> None:
    with faulty_server(status) as server:
        retriever = client(server)
        with pytest.raises(RetrievalError, match=rf"rejected .*status {status}.*as told"):
            retriever.search("q", 2)
        assert len(server.requests) == 1
        assert retriever.search("q", 2) == HITS


def test_answers_are_kept_and_callers_cannot_change_them() -> None:
    with faulty_server() as server:
        retriever = client(server, cache_size=2)
        retriever.search("q", 2).clear()
        assert retriever.search("q", 2) == HITS
        assert len(server.requests) == 1
        for query in "abq":
            retriever.search(query, 2)
        assert len(server.requests) == 4


@pytest.mark.long
def test_many_threads_lose_no_question() -> None:
    faults = ["500", "reset", "garbage", "cut", "close"] * 6
    with faulty_server(*faults) as server, ThreadPoolExecutor(50) as pool:
        retriever = client(server, retries=30)
        asked = [f"q{number}" for number in range(300)]
        answers = list(pool.map(lambda query: retriever.search(query, 1), asked))
        assert [answer[0].title for answer in answers] == asked


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_process_uses_connections_of_its_own() -> None:
    with faulty_server() as server:
        retriever = client(server, cache_size=0)
        retriever.search("q", 2)
        child = os.fork()
        if not child:
            try:
                os._exit(0 if retriever.search("q", 2) == HITS else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        assert server.connections == 2
        assert retriever.search("q", 2) == HITS
        assert server.connections == 2
