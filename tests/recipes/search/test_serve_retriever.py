"""The retrieval server: its form, its errors, how it starts and how it ends."""

import http.client
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.kit.script_kit import scripts
from tests.kit.waiting import PATIENCE

pytest.importorskip("bm25s")

with scripts():
    from search_env.retrieval import BM25Retriever, HttpRetriever, Passage
    from serve_retriever import RetrievalServer

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts/search/serve_retriever.py"
PASSAGES = [Passage('The "Heap"', "a tree\nwith order"), Passage("", "an untitled queue")]
PASSAGES += [Passage("Two\nlines", "of a title")]


class Broken:
    """A retriever that fails on one word."""

    def __init__(self) -> None:
        self.inner = BM25Retriever(PASSAGES)

    def ranked(self, query: str, top_k: int):
        if query == "fail":
            raise RuntimeError("index on fire")
        return self.inner.ranked(query, top_k)


@pytest.fixture
def server():
    server = RetrievalServer(("127.0.0.1", 0), Broken())
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ask(server, body, path="/retrieve", method="POST", connection=None, headers=None):
    """Status and content of the answer."""
    connection = connection or http.client.HTTPConnection(*server.server_address[:2], timeout=PATIENCE)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request(method, path, data, headers or {})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def url(server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/retrieve"


def test_it_answers_in_search_r1s_form(server) -> None:
    status, content = ask(server, {"queries": ["heap", "zebra", " "], "topk": 1, "return_scores": True})
    assert status == 200
    (hit,), nothing, blank = content["result"]
    assert hit["document"] == {"contents": '"The "Heap""\na tree\nwith order'}
    assert hit["score"] > 0
    assert nothing == blank == []
    status, content = ask(server, {"queries": ["queue"]})
    assert (status, content) == (200, {"result": [[{"contents": '""\nan untitled queue'}]]})


def test_our_client_gets_the_passages_back(server) -> None:
    retriever = HttpRetriever(url(server))
    assert retriever.search("heap", 3) == [PASSAGES[0]]
    assert retriever.search("queue", 3) == [PASSAGES[1]]
    # In this form the title is the first line.
    assert retriever.search("lines", 3) == [Passage("Two lines", "of a title")]


@pytest.fixture
def corpus(tmp_path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"title": p.title, "text": p.text}) for p in PASSAGES))
    return path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_as_a_command_over_a_corpus_file(corpus, number) -> None:
    command = [sys.executable, SCRIPT, "--corpus", corpus, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:")
        retriever = HttpRetriever(line.split()[-1])
        assert retriever.search("tree", 3) == [PASSAGES[0]]
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, out, err) == (0, "", "")
    finally:
        process.kill()
