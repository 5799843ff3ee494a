"""Where searches go: indexes on disk and servers, each a `Retriever`.

The heavy packages (numpy, bm25s, faiss) are imported with the module that needs them, not here.
"""

from .specs import open_retriever

__all__ = ["open_retriever"]
