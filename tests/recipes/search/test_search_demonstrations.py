import random
from pathlib import Path

import pytest

from scripts.search.search_env.env import StdlibSearchEnv
from scripts.search.search_env.retrieval import stdlib_search_dataset
from tests.kit.script_kit import scripts

with scripts() as _module:
    maker = _module("stdlib_questions")
QUESTIONS, is_held_out = maker.QUESTIONS, maker.is_held_out

pytest.importorskip("bm25s")


@pytest.fixture
def demos(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "scripts" / "makers"))
    import search_demonstrations

    return search_demonstrations


@pytest.mark.long
def test_right_behaviour_always_succeeds(demos) -> None:
    rng = random.Random(0)
    source = demos.TaskSource(rng, 0.5)
    for _ in range(300):
        task = source.draw()
        messages = demos.demonstrate(task, demos.EXPERT, rng)
        assert len(messages) == 2 * (len(task.path) + 1)
        env = StdlibSearchEnv(task.retriever)
        env.reset(answers=[task.answer])
        outcomes = [env.step(m["content"]) for m in messages if m["role"] == "assistant"]
        assert outcomes[-1][1] == 1.0
        # Copying suffices: every name that is said has been shown before.
        for position, action in enumerate(messages[1::2]):
            name = action["content"].split("> ")[1].split("</")[0]
            shown = [message["content"] for message in messages[: 2 * position + 1 : 2]]
            assert any(f" {name}" in text for text in shown)


@pytest.mark.long
def test_held_out_names_are_not_asked(demos) -> None:
    held_out = {row["prompt"][0]["content"] for row in stdlib_search_dataset("test")}
    source = demos.TaskSource(random.Random(0), 1.0)
    assert not held_out & {source.draw().question for _ in range(500)}
    assert not any(is_held_out(row["name"]) for row in stdlib_search_dataset("train"))
