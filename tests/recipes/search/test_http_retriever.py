"""The HTTP retriever against a server that fails in every way a server can."""

import gc
import os
import pickle
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from faulty_server import HANG_SECONDS, faulty_server
from tests.tiers import quick
from tests.waiting import PATIENCE, wait_until
from trl_stppo.errors import RetrievalError
from trl_stppo.recipes.search import SearchEnv
from trl_stppo.recipes.search.retrieval import Passage, Retriever
from trl_stppo.recipes.search.retrievers import deadline_http, specs
from trl_stppo.recipes.search.retrievers.cache import SharedCache
from trl_stppo.recipes.search.retrievers.remote import HttpRetriever

HANGING = ("hang", "drip", "drip_head")
BROKEN = ("500", "reset", "garbage")
QUICK = {"timeout": PATIENCE, "deadline": 2 * PATIENCE, "backoff": 0.01, "max_backoff": 0.05}
HITS = [Passage("q", "passage 0"), Passage("q", "passage 1")]


def client(server, **settings) -> HttpRetriever:
    return HttpRetriever(server.url, **{**QUICK, **settings})


def test_it_asks_in_search_r1s_form() -> None:
    with faulty_server() as server:
        retriever = client(server)
        assert isinstance(retriever, Retriever)
        assert retriever.search("q", 2) == HITS
        assert server.requests == [{"queries": ["q"], "topk": 2, "return_scores": True}]


@pytest.mark.parametrize("fault", ["plain", "chunked"])
def test_other_right_answers_are_read(fault) -> None:
    with faulty_server(fault) as server:
        assert client(server).search("q", 2) == HITS
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    "fault",
    quick(
        [*BROKEN, "503", "429", *HANGING, "close", "cut", "shape"],
        *[*BROKEN, "503", "429", "hang", "close", "cut", "shape"],
    ),
)
def test_a_failure_is_asked_again(fault) -> None:
    with faulty_server(fault, fault) as server:
        retriever = client(server, timeout=0.5 if fault in HANGING else PATIENCE)
        started = time.monotonic()
        assert retriever.search("q", 2) == HITS
        assert time.monotonic() - started < HANG_SECONDS
        if fault not in HANGING:  # a busy machine may need another attempt
            assert (len(server.requests), retriever.requests, retriever.retried) == (3, 3, 2)


@pytest.mark.parametrize("fault", quick([*BROKEN, "hang", "drip"], *BROKEN, "drip"))
def test_after_the_last_retry_the_error_says_what_happened(fault) -> None:
    with faulty_server(*[fault] * 9) as server:
        retriever = client(server, retries=2, timeout=0.2 if fault in HANGING else PATIENCE)
        with pytest.raises(RetrievalError, match=r"no answer in 3 attempts .*last failure: \w+: "):
            retriever.search("q", 1)
        assert wait_until(lambda: len(server.requests) == 3)


def test_nobody_listening_is_such_a_failure() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RetrievalError, match="ConnectionRefusedError"):
            HttpRetriever(url, **QUICK, retries=1).search("q", 1)


@pytest.mark.parametrize("fault", quick([*HANGING, "500"], "drip_head", "500"))
def test_the_deadline_ends_everything(fault) -> None:
    with faulty_server(*[fault] * 99) as server:
        started = time.monotonic()
        with pytest.raises(RetrievalError, match=r"0\.7 s in all"):
            client(server, timeout=0.3, deadline=0.7, retries=99, backoff=0.05).search("q", 1)
        assert 0.3 < time.monotonic() - started < HANG_SECONDS


@pytest.mark.parametrize("status", ["400", "404", "422", "302"])
def test_a_refusal_is_not_repeated(status) -> None:
    with faulty_server(status) as server:
        with pytest.raises(RetrievalError, match=rf"refused .*status {status}.*as told"):
            client(server).search("q", 1)
        assert len(server.requests) == 1
        assert client(server).search("q", 2) == HITS


def test_an_endless_answer_is_cut_off(monkeypatch) -> None:
    monkeypatch.setattr(deadline_http, "MAX_BYTES", 2**20)
    with faulty_server("huge", "huge") as server:
        with pytest.raises(RetrievalError, match="more than 1048576 bytes"):
            client(server, retries=0).search("q", 2)
        assert client(server).search("q", 2) == HITS


def test_connections_are_kept() -> None:
    with faulty_server() as server:
        retriever = client(server)
        for number in range(20):
            retriever.search(f"q{number}", 1)
        assert server.connections == 1


def test_a_kept_connection_that_died_is_no_failure() -> None:
    with faulty_server("goodbye", "ok", "goodbye", "goodbye") as server:
        retriever = client(server, retries=0)
        for number in range(6):
            assert len(retriever.search(f"q{number}", 1)) == 1
            time.sleep(0.03)
        assert retriever.retried == 0
        assert server.connections == 4


def test_a_kept_connection_that_dies_of_the_question_is_no_failure() -> None:
    with faulty_server("ok", "close", "ok", "cut") as server:
        retriever = client(server, retries=0)
        assert [len(retriever.search(f"q{number}", 1)) for number in range(2)] == [1, 1]
        assert (len(server.requests), server.connections) == (3, 2)
        with pytest.raises(
            RetrievalError, match="in 1 attempts"
        ):  # an answer that breaks off is one
            retriever.search("q2", 1)
        assert len(server.requests) == 4


def test_connections_go_with_the_retriever() -> None:
    with faulty_server() as server:
        retriever = client(server)
        retriever.search("q", 1)
        pool = retriever._poster._client._transport._pool
        assert len(pool.connections) == 1
        del retriever
        gc.collect()
        assert wait_until(lambda: not pool.connections)


def test_a_connection_that_says_it_closes_is_not_kept() -> None:
    with faulty_server("farewell", "farewell") as server:
        retriever = client(server, retries=0)
        assert [len(retriever.search(f"q{number}", 1)) for number in range(4)] == [1, 1, 1, 1]
        assert server.connections == 3


def test_a_broken_connection_is_not_kept() -> None:
    with faulty_server("hang", "cut", "garbage", "ok", "500", "ok") as server:
        retriever = client(server, timeout=1.0)
        assert [len(retriever.search(f"q{number}", 1)) for number in range(3)] == [1, 1, 1]
        # After the hang and the cut; an unreadable answer and a 500 end properly.
        assert server.connections == 3


def test_equal_questions_at_once_are_asked_once() -> None:
    with faulty_server("slow") as server, ThreadPoolExecutor(20) as pool:
        retriever = client(server)
        assert list(pool.map(lambda _: retriever.search("q", 2), range(20))) == [HITS] * 20
        assert len(server.requests) == 1


def test_callers_cannot_change_what_is_kept() -> None:
    with faulty_server() as server:
        retriever = client(server)
        retriever.search("q", 2).clear()
        assert retriever.search("q", 2) == HITS
        assert len(server.requests) == 1


def test_failures_are_not_kept() -> None:
    with faulty_server("400") as server:
        retriever = client(server)
        with pytest.raises(RetrievalError):
            retriever.search("q", 2)
        assert retriever.search("q", 2) == HITS


def test_the_cache_is_bounded_and_drops_the_oldest() -> None:
    asked = []
    cache = SharedCache(2)
    for key in "aabacab":
        assert cache.get(key, lambda key=key: asked.append(key) or key) == key
    assert asked == ["a", "b", "c", "b"]
    assert len(cache._known) == 2
    assert not cache._coming
    nothing = SharedCache(0)
    assert [nothing.get("a", lambda: 1), nothing.get("a", lambda: 2)] == [1, 2]


def _is_waited_for(future) -> bool:
    """Whether a thread is blocked on its result."""
    return bool(future._condition._waiters)


def test_who_waits_for_a_failing_question_fails_too() -> None:
    cache, entered, go = SharedCache(2), threading.Event(), threading.Event()

    def failing():
        entered.set()
        go.wait(PATIENCE)
        raise RetrievalError("down")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, "a", failing)
        entered.wait(PATIENCE)
        second = pool.submit(cache.get, "a", lambda: 1)
        assert wait_until(lambda: _is_waited_for(cache._coming["a"]))
        go.set()
        assert isinstance(first.exception(), RetrievalError)
        assert isinstance(second.exception(), RetrievalError)
        # An error of its own: raising writes into it.
        assert second.exception() is not first.exception()
        assert second.exception().__cause__ is first.exception()
        assert str(second.exception()) == "down"
    assert cache.get("a", lambda: 2) == 2


def test_who_waits_for_an_interrupted_question_is_told_so() -> None:
    cache, entered, go = SharedCache(2), threading.Event(), threading.Event()

    def interrupted():
        entered.set()
        go.wait(PATIENCE)
        raise KeyboardInterrupt

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, "a", interrupted)
        entered.wait(PATIENCE)
        second = pool.submit(cache.get, "a", lambda: 1)
        assert wait_until(lambda: _is_waited_for(cache._coming["a"]))
        go.set()
        assert isinstance(first.exception(), KeyboardInterrupt)
        with pytest.raises(RetrievalError, match="another thread, failed with KeyboardInterrupt"):
            second.result()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_process_waits_for_no_question_of_its_parent() -> None:
    """Nor for a lock that a thread of the parent held at that moment."""
    with faulty_server("hang") as server, ThreadPoolExecutor(1) as pool:
        retriever = client(server, retries=0)
        asking = pool.submit(retriever.search, "q", 2)
        while not server.requests:
            time.sleep(0.01)
        with retriever._lock, retriever._cache._lock, deadline_http._loop._lock, specs._lock:
            child = os.fork()
            if not child:
                try:
                    signal.alarm(60)  # ends a child that waits
                    with specs._lock:
                        os._exit(0 if retriever.search("q", 2) == HITS else 1)
                finally:
                    os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        server.released.set()
        with pytest.raises(RetrievalError):
            asking.result()


def test_many_threads_lose_no_question() -> None:
    faults = ["500", "reset", "garbage", "cut", "close"] * 6
    with faulty_server(*faults) as server, ThreadPoolExecutor(50) as pool:
        retriever = client(server, retries=30)
        asked = [f"q{number}" for number in range(300)]
        answers = list(pool.map(lambda query: retriever.search(query, 1), asked))
        assert [answer[0].title for answer in answers] == asked
        assert retriever.requests == 300 + retriever.retried
        assert len(retriever._poster._client._transport._pool.connections) <= 50


def test_blank_questions_are_not_sent_and_top_k_is_checked() -> None:
    with faulty_server() as server:
        assert client(server).search(" \n", 3) == []
        with pytest.raises(ValueError, match="top_k is 0"):
            client(server).search("q", 0)
        assert client(server).search("lone \ud800 surrogate", 1)[0].text == "passage 0"
        assert len(server.requests) == 1


def test_it_travels_to_other_processes() -> None:
    with faulty_server() as server:
        retriever = client(server, retries=2)
        retriever.search("q", 2)
        copy = pickle.loads(pickle.dumps(retriever))
        assert (copy.url, copy.settings) == (retriever.url, retriever.settings)
        assert copy.search("q", 2) == HITS


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


@pytest.mark.parametrize(
    ("url", "settings", "message"),
    [
        ("ftp://x/y", {}, "url is 'ftp"),
        ("http:///y", {}, "url is 'http:///y'"),
        ("http://x/a b", {}, "holds a space"),
        ("http://x/a\n", {}, "holds a space"),
        ("http://x/\u00e9", {}, "not ASCII"),
        ("http://x:99999/y", {}, "Port out of range"),
        ("http://x:y/", {}, "Port could not be cast"),
        ("http://x:/y", {}, "port is missing or 0"),
        ("http://x:0/y", {}, "port is missing or 0"),
        ("http://[::1/y", {}, "Invalid IPv6"),
        ("http://x/y#z", {}, "#z would not be sent"),
        ("http://me:secret@x/y", {}, r"url is 'http://\.\.\.@x/y'; it holds a user"),
        ("http://me:secret@x:y/", {}, r"url is 'http://\.\.\.@x:y/'"),
        ("http://x", {"timeout": 0}, "timeout is 0"),
        ("http://x", {"timeout": 9, "deadline": 5}, "timeout is 9 and deadline 5"),
        ("http://x", {"retries": -1}, "retries is -1"),
    ],
)
def test_settings_are_checked(url, settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        HttpRetriever(url, **settings)


def test_the_environment_shows_what_the_server_found() -> None:
    with faulty_server("500") as server:
        env = SearchEnv(server.url, top_k=2)
        env.reset(answers=["x"])
        observation = env.step("<search>q</search>")[0]
    assert observation == (
        '<information>Doc 1(Title: "q") passage 0\nDoc 2(Title: "q") passage 1</information>'
    )
