r"""Build a search index from a corpus of passages.

    python scripts/search/build_index.py bm25 corpus.jsonl indexes/wiki
    python scripts/search/build_index.py dense corpus.jsonl indexes/wiki-e5 --encoder intfloat/e5-base-v2

One JSON object per line: {"id": "0", "contents": "\"Title\"\ntext"}, as Search-R1 has it, or
{"title": "...", "text": "..."}; .gz is read too. An interrupted build leaves no index.
bm25 needs `pip install 'bm25s>=0.3.10'`, dense `pip install 'faiss-cpu>=1.9' 'sentence-transformers>=3'`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from search_env.retrieval import Passage
from search_index import DenseSettings, build_bm25, build_dense, read_corpus

REPORT_EVERY = 100_000


def reported(passages: Iterable[Passage]) -> Iterator[Passage]:
    """The passages, with a line on stderr now and then."""
    started = time.monotonic()
    for number, passage in enumerate(passages, start=1):
        yield passage
        if number % REPORT_EVERY == 0:
            seconds = time.monotonic() - started
            print(f"{number:,} passages, {seconds:.0f} s", file=sys.stderr, flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("corpus", type=Path, nargs="+", help="JSONL files, in this order")
    common.add_argument("folder", type=Path, help="where the index is to be")
    words = kinds.add_parser("bm25", parents=[common], help="by words")
    words.add_argument("--k1", type=float, default=0.9)
    words.add_argument("--b", type=float, default=0.4)
    words.add_argument("--stop_words", choices=("english", "none"), default="english")
    words.add_argument("--block_tokens", type=int, default=10_000_000, help="words in memory")
    dense = kinds.add_parser("dense", parents=[common], help="by meaning")
    dense.add_argument("--encoder", default="intfloat/e5-base-v2", help="sentence-transformers")
    dense.add_argument("--query_prefix", default="query: ")
    dense.add_argument("--passage_prefix", default="passage: ")
    dense.add_argument("--no_normalize", action="store_true", help="dot product, not cosine")
    dense.add_argument("--factory", default="Flat", help="faiss's description of the index")
    dense.add_argument("--batch_size", type=int, default=256)
    return parser.parse_args()


def build(args: argparse.Namespace) -> int:
    """Build what the flags say; the number of passages."""
    passages = reported(p for path in args.corpus for p in read_corpus(path))
    if args.kind == "bm25":
        return build_bm25(
            passages,
            args.folder,
            k1=args.k1,
            b=args.b,
            stop_words_name=args.stop_words,
            block_tokens=args.block_tokens,
        )
    settings = DenseSettings(args.encoder, args.query_prefix, args.passage_prefix, not args.no_normalize)
    return build_dense(
        passages,
        args.folder,
        settings,
        factory=args.factory,
        batch_size=args.batch_size,
    )


def main() -> None:
    args, started = parse_args(), time.monotonic()
    try:
        count = build(args)
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"build_index: {error}")
    print(f"{count:,} passages in {time.monotonic() - started:.0f} s -> {args.folder}")


if __name__ == "__main__":
    main()
