"""A retriever that says what it is told to, and an environment with it."""

import pytest

from scripts.search.search_env import SearchEnv, StdlibSearchEnv
from scripts.search.search_env.retrieval import Passage


class ScriptedRetriever:
    """Returns what it was given and remembers what it was asked."""

    def __init__(self, *texts: str) -> None:
        self.passages = [text if isinstance(text, Passage) else Passage("T", text) for text in texts]
        self.asked: list[tuple[str, int]] = []

    def search(self, query: str, top_k: int) -> list[Passage]:
        self.asked.append((query, top_k))
        return self.passages


BOTH = pytest.mark.parametrize("kind", [SearchEnv, StdlibSearchEnv])


def started(*texts, kind=StdlibSearchEnv, **settings) -> tuple[SearchEnv, ScriptedRetriever]:
    retriever = ScriptedRetriever(*texts)
    env = kind(retriever, **settings)
    assert env.reset(prompt=[], answers=["csv", "_csv.x"], hops=1) == ("", {})
    return env, retriever
