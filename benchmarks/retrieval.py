"""Retrieval: a BM25 index of a million passages on disk, and the HTTP client under load and faults.

    index  built from synthetic passages of about a hundred words with Zipf's word frequencies, then
           opened by a process of its own: time and memory of both, time of a query
    http   200 threads ask a server of which 5 % of the answers are errors and 2 % never come

    python benchmarks/retrieval.py            # six minutes, 3 GB of disk
    python benchmarks/retrieval.py --quick    # under a minute, fewer passages

The last line is JSON with every figure.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _outcome import finish
from _retrieval_corpus import VOCABULARY, Language, passages, queries

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "search"))
TOP_K = 3
ERRORS, HANGS, HANG_SECONDS = 0.05, 0.02, 6.0
CLIENTS, TIMEOUT = 200, 2.0
CLIENT = {"timeout": TIMEOUT, "backoff": 0.05, "cache_size": 0}


def in_own_process(work: Callable[..., Any], *args: Any) -> Any:
    """The result of `work`, whose memory is its own."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(work, *args).result()


def memory() -> dict[str, float]:
    """MB of this process: at most so far, now, and of that anonymous and mapped from files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    names = {"peak": "VmHWM", "rss": "VmRSS", "anonymous": "RssAnon", "files": "RssFile"}
    return {name: int(status[key].split()[0]) / 1024 for name, key in names.items()}


def build(folder: str, count: int, stop_words: str) -> dict[str, Any]:
    """Build the index, and measure."""
    from search_index import build_bm25

    language = Language()
    started, before = time.perf_counter(), memory()
    for _ in passages(count, language):
        pass
    generating = time.perf_counter() - started
    build_bm25(passages(count, language), folder, stop_words_name=stop_words)
    # Passages are generated while indexing too.
    indexing = time.perf_counter() - started - 2 * generating
    size = sum(file.stat().st_size for file in Path(folder).iterdir())
    return {
        "seconds": indexing,
        "peak_mb": memory()["peak"],
        "before_mb": before["rss"],
        "disk_mb": size / 2**20,
    }


def ask(folder: str, count: int) -> dict[str, Any]:
    """Open the index, ask it, first from the disk and then from memory, and measure."""
    from search_index import BM25Index
    from trl_stppo.recipes.search.retrieval import Passage

    language = Language()
    with open(Path(folder) / "passages.jsonl", encoding="utf-8") as lines:
        sample = [Passage(*json.loads(line)) for _, line in zip(range(2000), lines, strict=False)]
    asked = queries(count, language, sample)
    del language, sample
    # Drop the files from the page cache.
    for file in Path(folder).iterdir():
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before, started = memory(), time.perf_counter()
    index = BM25Index(folder)
    opening, after_opening = time.perf_counter() - started, memory()
    cold, warm = _latencies(index, asked), _latencies(index, asked)
    after = memory()
    return {
        "open_seconds": opening,
        "terms": len(index._index.vocab_dict),
        "anonymous_mb": after["anonymous"] - before["anonymous"],
        "anonymous_after_opening_mb": after_opening["anonymous"] - before["anonymous"],
        "files_mb": after["files"] - before["files"],
        "rss_mb": after["rss"],
        "cold_ms": _figures(cold),
        "warm_ms": _figures(warm),
    }


def _latencies(index: Any, asked: list[str]) -> list[float]:
    taken = []
    for query in asked:
        started = time.perf_counter()
        index.search(query, TOP_K)
        taken.append(1000 * (time.perf_counter() - started))
    return taken


def _figures(taken: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(taken, n=100, method="inclusive")
    return {"p50": cuts[49], "p95": cuts[94], "max": max(taken)}


def serve(pipe: Any, count: int) -> None:
    """A server that fails; sends its port."""
    from serve_retriever import Handler, RetrievalServer
    from trl_stppo.recipes.search.retrieval import BM25Retriever

    class Failing(Handler):
        dice = random.Random(0)

        def do_POST(self) -> None:
            lot = self.dice.random()
            if lot < ERRORS:
                self.close_connection = True
                self._reply(503, {"error": "broken on purpose"})
                return
            if lot < ERRORS + HANGS:
                time.sleep(HANG_SECONDS)
            super().do_POST()

    retriever = BM25Retriever(list(passages(count, Language())))
    server = RetrievalServer(("127.0.0.1", 0), retriever)
    server.RequestHandlerClass = Failing
    pipe.send(server.server_address[1])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # The other side ends the server.
    pipe.recv()


def load(questions: int, count: int) -> dict[str, Any]:
    """Ask the failing server from many threads."""
    from trl_stppo.recipes.search.retrieval import BM25Retriever, HttpRetriever

    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(theirs, count), daemon=True)
    process.start()
    language = Language()
    corpus = list(passages(count, language))
    asked = queries(questions, language, corpus)
    local = BM25Retriever(corpus)
    expected = [local.search(query, TOP_K) for query in asked]
    retriever = HttpRetriever(f"http://127.0.0.1:{ours.recv()}/retrieve", **CLIENT)
    taken, outcome = [0.0] * questions, {"lost": 0, "wrong": 0}

    def one(number: int) -> None:
        started = time.perf_counter()
        try:
            found = retriever.search(asked[number], TOP_K)
        except Exception:
            outcome["lost"] += 1
        else:
            outcome["wrong"] += found != expected[number]
        taken[number] = 1000 * (time.perf_counter() - started)

    started = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(one, range(questions)))
    seconds = time.perf_counter() - started
    alive = process.is_alive()
    ours.send(None)
    process.join()
    return {
        "clients": CLIENTS,
        "queries": questions,
        **outcome,
        "server_alive": alive,
        "seconds": seconds,
        "ms": _figures(taken),
    }


def main() -> None:
    """Measure, then print the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer passages and queries")
    parser.add_argument("--passages", type=int, default=None, help="default: a million")
    parser.add_argument(
        "--folder", default=None, help="where the index goes; default: a temporary one"
    )
    options = parser.parse_args()
    count = options.passages or (40_000 if options.quick else 1_000_000)
    figures: dict[str, Any] = {"cores": os.cpu_count(), "passages": count, "words": VOCABULARY}
    for stop_words in ("english",) if options.quick else ("english", "none"):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            target = str(Path(folder) / "index")
            found = in_own_process(build, target, count, stop_words)
            found |= in_own_process(ask, target, 500 if options.quick else 2000)
        print(f"BM25, {count:,} passages, stop words: {stop_words}: {found}", file=sys.stderr)
        figures[f"index_{stop_words}"] = found
    figures["http"] = load(1000 if options.quick else 4000, 2000)
    finish(figures)


if __name__ == "__main__":
    main()
